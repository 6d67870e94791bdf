-- drain: stops (1) or resumes (0) new work on one replica; what runs there ends by itself.
-- KEYS as in _lib.lua. ARGV[2]: {replica, on}. Result: 1. Invariant: no sum changes.
pool(clock())
local q = unpack_one(ARGV[2])
sum_of(q[1])[S_DRAINED] = q[2]
sums_changed[q[1]] = true
flush()
return 1
