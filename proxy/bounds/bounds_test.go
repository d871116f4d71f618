package bounds

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// Pods that take all they can leave a part for the next one. Together they take at most
// twice as much as one of them gets.
func TestPoolsLeavePartsForOthers(t *testing.T) {
	const most, own, pods = 1024, 16, 40
	p := NewPool(most, own)
	var total int64
	accounts := make([]Account, pods)
	for i := range accounts {
		a := &accounts[i]
		a.Pool, a.Own = p, own
		for a.Take(1) {
		}
		a.Give(1)
		total += a.taken.Load()
		switch i {
		case 0:
			require.EqualValues(t, most, a.taken.Load())
		default:
			require.GreaterOrEqual(t, a.taken.Load(), int64(own))
		}
	}
	require.LessOrEqual(t, total, int64(2*most+pods*own))
	for i := range accounts {
		accounts[i].Give(accounts[i].taken.Load())
	}
	require.EqualValues(t, 2*(most-own), p.free.Load())
}

func TestPoolsCountConcurrentUse(t *testing.T) {
	p := NewPool(100, 3)
	accounts := make([]Account, 3)
	for i := range accounts {
		accounts[i].Pool, accounts[i].Own = p, 3
	}
	var wg sync.WaitGroup
	for i := range 12 {
		a := &accounts[i%len(accounts)]
		wg.Go(func() {
			for range 2000 {
				n := rand.Int64N(9)
				a.Take(n)
				a.Give(n)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 2*97, p.free.Load())
}

// Takes at the same time are together within the bound, as they are one after the other.
func TestConcurrentTakesStayWithinTheBound(t *testing.T) {
	const most, own, takers = 64, 8, 8
	a := Account{Pool: NewPool(most, own), Own: own}
	var within, peak atomic.Int64
	var takes sync.WaitGroup
	for range takers {
		takes.Go(func() {
			for range 20_000 {
				n := 1 + rand.Int64N(2*most/takers)
				if a.Take(n) {
					if now := within.Add(n); now > most {
						peak.Store(now)
					}
					runtime.Gosched() // others take meanwhile
					within.Add(-n)
				}
				a.Give(n)
			}
		})
	}
	takes.Wait()
	require.Zero(t, peak.Load(), "of at most %d", most)
	require.Zero(t, a.Taken())
}
