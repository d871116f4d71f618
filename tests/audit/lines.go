package audit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

// eachLine calls f with every terminated line of r and its number. Lines may have any
// length. f must not keep the line.
func eachLine(r io.Reader, f func(n int, line []byte) error) error {
	in := bufio.NewReaderSize(r, 1<<20)
	var long []byte
	for n := 1; ; {
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			long = append(long, line...)
			continue
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("reading line %d: %w", n, err)
		}
		if len(long) > 0 {
			line = append(long, line...)
			long = nil
		}
		if err := f(n, line[:len(line)-1]); err != nil {
			return err
		}
		n++
	}
}
