package sockdiag

import (
	"testing"

	"golang.org/x/sys/unix"
)

func FuzzParse(f *testing.F) {
	f.Add([]byte{unix.AF_INET})
	f.Add(make([]byte, sizeofDiagMsg+4))
	f.Fuzz(func(_ *testing.T, message []byte) { parse(message) })
}
