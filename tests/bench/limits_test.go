package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestLimitsAreMissedByMoreThanNoise(t *testing.T) {
	rounds := func(above int) []float64 {
		ratios := make([]float64, 18)
		for i := range ratios {
			ratios[i] = 0.8
			if i < above {
				ratios[i] = 1.1
			}
		}
		return ratios
	}
	for above, want := range map[int]string{
		0:  "<= 1 ok",
		9:  "<= 1 ok",
		10: "<= 1 within noise: above it in 10 of 18 rounds",
		12: "<= 1 within noise: above it in 12 of 18 rounds",
		13: "<= 1 MISSED",
		18: "<= 1 MISSED",
	} {
		text, over := limited(rounds(above), 1)
		assert.Equal(t, want, text, "%d rounds", above)
		assert.Equal(t, above > 12, over, "%d rounds", above)
	}
}

// Of 3 coins, 4 of the 8 outcomes show at least two heads.
func TestChance(t *testing.T) {
	assert.InDelta(t, 1, chance(0, 3), 1e-9)
	assert.InDelta(t, 0.5, chance(2, 3), 1e-9)
	assert.InDelta(t, 0.125, chance(3, 3), 1e-9)
}
