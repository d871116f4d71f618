package filter

// KeyOf reads what decides on the one object of a body: of the object itself, or of
// the row of a Table. What is of no namespace has an empty one.
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
