package proxy

import (
	"fmt"
	"sync"
	"time"
)

// noticeInterval is the least time between two notices of one kind about a pod.
const noticeInterval = time.Minute

// notices limits the rate of notices about a pod. Reasons are a fixed set.
type notices struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func (n *notices) due(reason string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	if last, ok := n.last[reason]; ok && now.Sub(last) < noticeInterval {
		return false
	}
	if n.last == nil {
		n.last = map[string]time.Time{}
	}
	n.last[reason] = now
	return true
}

// notify calls Config.Notify, and does not wait for it.
func (p *Pod) notify(reason, format string, args ...any) {
	if p.server.notify != nil && p.notices.due(reason) {
		go p.server.notify(p.info, reason, fmt.Sprintf(format, args...))
	}
}
