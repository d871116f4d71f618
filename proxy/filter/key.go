package filter

// KeyOf returns the key of the only object of a body, or of the only row of a Table. The
// namespace of cluster-scoped objects is empty.
func KeyOf(contentType string, body []byte) (namespace, name, uid string, err error) {
	media, err := mediaType(contentType)
	if err != nil {
		return "", "", "", err
	}
	read := jsonKey
	if media == typeProtobuf {
		read = protoKey
	}
	k, err := read(body)
	return string(k.Namespace), string(k.Name), string(k.UID), err
}
