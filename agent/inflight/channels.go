package inflight

// Both returns a channel that is closed when a and b are, nil if they are closed or nil now.
func Both(a, b <-chan struct{}) <-chan struct{} {
	switch {
	case Closed(a) && Closed(b):
		return nil
	case Closed(a):
		return b
	case Closed(b):
		return a
	}
	c := make(chan struct{})
	go func() {
		<-a
		<-b
		close(c)
	}()
	return c
}

// Closed reports whether c is closed or nil.
func Closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return c == nil
	}
}
