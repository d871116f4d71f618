// Package sysdump collects into one archive what explains the state of the mesh: objects, reports of
// other commands, and logs. It requests no Secrets, and leaves out what users put into their pods.
//
//	sources.go  what is collected
//	collect.go  reads it, and writes the archive
//	archive.go  what was written
//	redact.go   what is left out of objects and logs
package sysdump
