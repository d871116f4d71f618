package route

import "encoding/json"

// Allowed returns the body of the response that allows what an AdmissionReview asks for.
func Allowed(h Head) []byte {
	type response struct {
		UID     string `json:"uid"`
		Allowed bool   `json:"allowed"`
	}
	body, _ := json.Marshal(struct { // strings and a bool have no error
		Kind       Kind     `json:"kind"`
		APIVersion string   `json:"apiVersion"`
		Response   response `json:"response"`
	}{Admission, h.APIVersion, response{h.UID, true}})
	return body
}
