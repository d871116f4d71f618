// Package query edits one parameter of a raw URL query, and keeps every other byte.
//
// Parsing is strict: a query is an error if net/url would silently drop parts of it, so
// that two readers never differ on what was requested.
package query

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Get returns the first value of key, as the apiserver does: it ignores later ones. The
// error says which part of raw is malformed.
func Get(raw, key string) (value string, ok bool, err error) {
	err = each(raw, func(k, v string, _ string) error {
		if k != key || ok {
			return nil
		}
		ok = true
		value, err = url.QueryUnescape(v)
		return err
	})
	return value, ok, err
}

// Set returns raw with the first value of key replaced, or with the parameter appended if
// it is absent. It drops later values of key: the apiserver ignores them, and servers
// behind it must not read them.
func Set(raw, key, value string) (string, error) {
	var out strings.Builder
	out.Grow(len(raw) + len(key) + len(value) + 16)
	write := func(part string) {
		if out.Len() > 0 {
			out.WriteByte('&')
		}
		out.WriteString(part)
	}
	pair := key + "=" + url.QueryEscape(value)
	done := false
	err := each(raw, func(k, _ string, part string) error {
		switch {
		case k != key:
			write(part)
		case !done:
			write(pair)
			done = true
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	if !done {
		write(pair)
	}
	return out.String(), nil
}

// Delete returns raw without the parameters of some keys.
func Delete(raw string, keys ...string) (string, error) {
	var kept []string
	err := each(raw, func(k, _ string, part string) error {
		if !slices.Contains(keys, k) {
			kept = append(kept, part)
		}
		return nil
	})
	return strings.Join(kept, "&"), err
}

// each calls f with the decoded key, the raw value and the raw pair of every
// parameter, and checks that values decode too.
func each(raw string, f func(key, rawValue, part string) error) error {
	for part := range strings.SplitSeq(raw, "&") {
		if part == "" {
			continue
		}
		if strings.Contains(part, ";") {
			return fmt.Errorf("malformed query: a semicolon is no separator")
		}
		k, v, _ := strings.Cut(part, "=")
		key, err := url.QueryUnescape(k)
		if err == nil {
			_, err = url.QueryUnescape(v)
		}
		if err != nil {
			return fmt.Errorf("malformed query: %w", err)
		}
		if err := f(key, v, part); err != nil {
			return err
		}
	}
	return nil
}
