package trust

import (
	"bytes"
	"crypto/sha1" // names of files, as OpenSSL has them
	"crypto/x509"
	"encoding/asn1"
	"encoding/binary"
	"fmt"
	"strings"
)

// Directory returns a bundle as the files of a directory that OpenSSL and Go can read. OpenSSL
// finds certificates by a hash of their subject; Go reads all files.
func Directory(bundle []byte) (map[string]string, error) {
	certs, err := decodeCerts(bundle)
	if err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, c := range certs {
		hash, err := subjectHash(c)
		if err != nil {
			return nil, fmt.Errorf("hashing the subject of a certificate: %w", err)
		}
		name := ""
		for i := 0; name == "" || files[name] != ""; i++ {
			name = fmt.Sprintf("%08x.%d", hash, i)
		}
		files[name] = string(encodePEM("CERTIFICATE", c.Raw))
	}
	return files, nil
}

// subjectHash is X509_NAME_hash of OpenSSL 1.0 and later: the SHA-1 of the subject's parts, with
// their texts as UTF-8 in lower case with single spaces.
func subjectHash(c *x509.Certificate) (uint32, error) {
	type attribute struct {
		Type  asn1.ObjectIdentifier
		Value string `asn1:"utf8"`
	}
	type attributeSET []attribute
	var canonical bytes.Buffer
	for _, a := range c.Subject.Names { // ours have one in each part
		text, ok := a.Value.(string)
		if !ok {
			return 0, fmt.Errorf("attribute %s is no text", a.Type)
		}
		der, err := asn1.Marshal(attributeSET{{a.Type, strings.ToLower(strings.Join(strings.Fields(text), " "))}})
		if err != nil {
			return 0, err
		}
		canonical.Write(der)
	}
	sum := sha1.Sum(canonical.Bytes())
	return binary.LittleEndian.Uint32(sum[:]), nil
}
