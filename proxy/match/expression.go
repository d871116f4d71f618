package match

import (
	"regexp"
	"runtime"
	"sync"
	"weak"
)

// expressions are the expressions in use, by their text. They are shared, because many
// pods have the same ones, and a policy is compiled more than once.
var expressions = struct {
	sync.Mutex
	by map[string]weak.Pointer[regexp.Regexp]
}{by: map[string]weak.Pointer[regexp.Regexp]{}}

// expressionOf returns an expression that matches whole strings. It compiles it unless it
// is in use already.
func expressionOf(text string) (*regexp.Regexp, error) {
	expressions.Lock()
	re := expressions.by[text].Value()
	expressions.Unlock()
	if re != nil {
		return re, nil
	}
	re, err := regexp.Compile(`^(?:` + text + `)$`)
	if err != nil {
		return nil, err
	}
	expressions.Lock()
	defer expressions.Unlock()
	if first := expressions.by[text].Value(); first != nil {
		return first, nil // compiled concurrently for another pod
	}
	expressions.by[text] = weak.Make(re)
	runtime.AddCleanup(re, forgetExpression, text)
	return re, nil
}

// forgetExpression is called after an expression was garbage-collected.
func forgetExpression(text string) {
	expressions.Lock()
	defer expressions.Unlock()
	if expressions.by[text].Value() == nil { // else it was compiled again
		delete(expressions.by, text)
	}
}
