// Package validate refuses ShardingConfigs that cannot work, with a message that
// says what to change. Config and Overlap are pure; Webhook is their admission.
package validate
