-- Shared by every script of the ledger; the loader puts it in front of the operation's own file (and, where reservations
-- end, _keep.lua between them), and writes the values of names in capitals in their places: a local of the chunk that
-- many functions use costs a call more than what it does.
--
-- Records are read and written through `records`, indexes through `enter` and `leave`: what a call changes is sent once,
-- by `settle`, however many requests the call carries. Whatever reads a range of an index settles first.
--
-- KEYS (the same list for every script, built in keys.py; all carry the hash tag {pool}):
--    1 meta   hash   epoch, loss_us, schema, kept (the share of promises that are taken up)
--    2 res    hash   rid -> record R (live) or tombstone T, msgpack arrays
--    3 idx    zset   lex: replica | expected end | blocks | sequences | lane | rid; one entry per live reservation
--    4 due    zset   rid by the time (us) at which something happens to it by itself:
--                    reserved: its lease; orphaned: its cap; cooling: its release; tombstone: its removal
--    5 join   hash   owner | request id -> rid, for ends that do not know the rid; the latest where several share one
--    6 sum    hash   replica -> sums S
--    7 lane   hash   lane -> live reservations
--    8 rep    hash   replica -> report P
--    9 dev    hash   device -> report D
--   10 devx   zset   lex: device | rid | bytes; allocations that no scrape of the device can have seen yet
--   11 devp   hash   device -> sum of the bytes in devx
--   12 ended  zset   lex: replica | ended | rid; one entry per tombstone
--   13 orph   zset   lex: owner | rid; one entry per orphaned reservation
--   14 alive  zset   instance by the time (us) its heartbeat lapses
--   15 line   zset   token | replica | blocks | first refused | due, by due: those who were told when to come back
--   16 lessons hash  name -> {weight, {figures}, told at}: what sidecars learned from answers
-- ARGV[1] '' or, in tests only, the clock in us; ARGV[2] the operation's msgpack payload.
-- Units: every time is microseconds on the server's clock, an integer below 2^53, so a Lua number holds it exactly;
-- it is never concatenated (that would keep 14 digits) but formatted by stamp(). -1 stands for "not known".
-- Invariant of all scripts: sum and lane equal the sums over the live records of res; idx holds exactly one entry per
-- live record, due one per record of either kind.

local META, RES, IDX, DUE, JOIN, SUM, LANE, REP = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local DEV, DEVX, DEVP, ENDED, ORPH, ALIVE = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local LINE, LESSONS = KEYS[15], KEYS[16]

local SCHEMA = 1
local SEP, AFTER = '\31', '\32'
local TOMBSTONE_US, GRACE_US, BYPASS_US = 60000000, 1500000, 30000000
local SILENCE_US, LOSS_US = 10000000, 60000000
-- Arguments of one command at most, an even number.
local ARGS = 1000

-- R, a live reservation
local STATE, TARGET, REPLICA, LANE_OF, OWNER, REQUEST, KLASS, MADE = 1, 2, 3, 4, 5, 6, 7, 8
local KV, INPUT, KVBYTES, PREFILL, SEQS, IN_TOKENS, OUT_TOKENS, MAX_OUT = 9, 10, 11, 12, 13, 14, 15, 16
local CAP_BLOCKS, CAP_US, EXPECTED_US, VRAM = 17, 18, 19, 20
local CURRENT, LEASE, FIRST, SEEN, ENDED_AT, AHEAD, POOL_THEN, COMMITTED_THEN, HOW = 21, 22, 23, 24, 25, 26, 27, 28, 29
-- T, a tombstone: 't', how, replica, made, current blocks, input blocks, sequences, first byte, ended, vram
-- S, sums of a replica
local S_KV, S_SEQ, S_N, S_ORPHANS, S_LEVEL, S_AT, S_RATE = 1, 2, 3, 4, 5, 6, 7
local S_OVER_ADOPTED, S_OVER_GREW, S_OVER_FOREIGN, S_DRAINED, S_LANES = 8, 9, 10, 11, 12
-- P, the report of a replica
local P_STATE, P_START, P_END, P_CAPACITY, P_WAITING, P_MAXSEQ, P_EXPIRES = 1, 2, 3, 4, 5, 6, 7
local P_FOREIGN, P_BYPASS, P_MODE, P_PROVEN, P_BLOB = 8, 9, 10, 11, 12
local P_TRIAL = 13
-- D, the report of a device: state, scrape start, free bytes, expires, blob

local call, pack, unpack_one = redis.call, cmsgpack.pack, cmsgpack.unpack
local format, floor, max, min = string.format, math.floor, math.max, math.min

local function stamp(us) return format('%016d', us) end

local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local t = call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end

-- The pool's epoch and the time its data was last found lost; a missing epoch is a loss seen now.
local function pool(now, declared_new)
  local m = call('HMGET', META, 'epoch', 'loss_us', 'schema')
  if m[1] then
    if tonumber(m[3]) > SCHEMA then error('KVGATE_SCHEMA the ledger is of schema ' .. m[3]) end
    return m[1], tonumber(m[2])
  end
  local loss = declared_new and 0 or now
  call('HSET', META, 'epoch', stamp(now), 'loss_us', stamp(loss), 'schema', SCHEMA)
  return stamp(now), loss
end

-- What was read and what was changed since: rid -> R, T or false; replica -> S, P; index -> member -> score or false;
-- owner and request -> rid or false; lane -> reservations more.
local records, records_changed = {}, {}
local sums, sums_changed, reps, reps_changed = {}, {}, {}, {}
local queued, joins, lanes = {}, {}, {}

-- One command with all of `args` (n of them, in steps of an even number: a script's stack is bounded).
local function many(command, key, args, n)
  for from = 1, n, ARGS do call(command, key, unpack(args, from, min(n, from + ARGS - 1))) end
end

local function put(key, fields)
  local set, gone, n, g = {}, {}, 0, 0
  for field, value in pairs(fields) do
    if value then
      set[n + 1], set[n + 2], n = field, value, n + 2
    else
      g = g + 1
      gone[g] = field
    end
  end
  if n > 0 then many('HSET', key, set, n) end
  if g > 0 then many('HDEL', key, gone, g) end
end

local function enter(index, member, score)
  local members = queued[index]
  if not members then
    members = {}
    queued[index] = members
  end
  members[member] = score
end

local function leave(index, member) enter(index, member, false) end

local function settle()
  if next(records_changed) then
    for rid in pairs(records_changed) do records_changed[rid] = records[rid] and pack(records[rid]) end
    put(RES, records_changed)
    records_changed = {}
  end
  if next(joins) then
    put(JOIN, joins)
    joins = {}
  end
  for index, members in pairs(queued) do
    local set, gone, n, g = {}, {}, 0, 0
    for member, score in pairs(members) do
      if score then
        set[n + 1], set[n + 2], n = score, member, n + 2
      else
        g = g + 1
        gone[g] = member
      end
    end
    if n > 0 then many('ZADD', index, set, n) end
    if g > 0 then many('ZREM', index, gone, g) end
    queued[index] = nil
  end
end

-- Every script that changes anything ends with this.
local function flush()
  settle()
  for lane, more in pairs(lanes) do
    if more ~= 0 then call('HINCRBY', LANE, lane, more) end
  end
  for replica in pairs(sums_changed) do call('HSET', SUM, replica, pack(sums[replica])) end
  for replica in pairs(reps_changed) do call('HSET', REP, replica, pack(reps[replica])) end
end

-- Reads the records of `rids` at once; record_of then has them.
local function fetch(rids)
  local missing, n = {}, 0
  for _, rid in ipairs(rids) do
    if records[rid] == nil then
      n = n + 1
      missing[n] = rid
    end
  end
  for from = 1, n, ARGS do
    for i, raw in ipairs(call('HMGET', RES, unpack(missing, from, min(n, from + ARGS - 1)))) do
      records[missing[from + i - 1]] = raw and unpack_one(raw)
    end
  end
end

local function record_of(rid)
  local r = records[rid]
  if r == nil then
    local raw = call('HGET', RES, rid)
    r = raw and unpack_one(raw)
    records[rid] = r
  end
  return r
end

local function keep(rid, r) records[rid], records_changed[rid] = r, true end

local function sum_of(replica)
  local s = sums[replica]
  if not s then
    local raw = call('HGET', SUM, replica)
    s = raw and unpack_one(raw) or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}}
    sums[replica] = s
  end
  return s
end

local function rep_of(replica)
  local p = reps[replica]
  if p == nil then
    local raw = call('HGET', REP, replica)
    p = raw and unpack_one(raw)
    reps[replica] = p
  end
  return p
end

local function index_entry(rid, r)
  return format('%s\31%016d\31%d\31%d\31%s\31%s', r[REPLICA], r[MADE] + r[EXPECTED_US], r[CURRENT], r[SEQS], r[LANE_OF], rid)
end

local function add_stock(r, sign)
  local replica, lane = r[REPLICA], r[LANE_OF]
  local s = sum_of(replica)
  sums_changed[replica] = true
  s[S_KV], s[S_SEQ], s[S_N] = s[S_KV] + sign * r[CURRENT], s[S_SEQ] + sign * r[SEQS], s[S_N] + sign
  local blocks = (s[S_LANES][lane] or 0) + sign * r[CURRENT]
  s[S_LANES][lane] = blocks ~= 0 and blocks or nil
  lanes[lane] = (lanes[lane] or 0) + sign
  return s
end

-- Device bytes stay pending until a scrape that began later has seen them, or seen them gone (publish).
local function add_vram(rid, vram)
  for i = 1, #vram, 2 do
    if vram[i + 1] > 0 then
      local bytes = format('%d', vram[i + 1])
      if call('ZADD', DEVX, 0, vram[i] .. SEP .. rid .. SEP .. bytes) == 1 then
        call('HINCRBY', DEVP, vram[i], bytes)
      end
    end
  end
end

local function insert(rid, r)
  local s = add_stock(r, 1)
  keep(rid, r)
  enter(IDX, index_entry(rid, r), 0)
  enter(DUE, rid, r[LEASE])
  joins[r[OWNER] .. SEP .. r[REQUEST]] = rid
  if #r[VRAM] > 0 then add_vram(rid, r[VRAM]) end
  return s
end

local function level_at(s, rate, now) return max(0, s[S_LEVEL] - rate * (now - s[S_AT]) / 1000000) end

-- Index entries of one replica's live reservations, earliest expected end first.
local function indexed(replica, limit)
  settle()
  if limit then return call('ZRANGEBYLEX', IDX, '[' .. replica .. SEP, '(' .. replica .. AFTER, 'LIMIT', 0, limit) end
  return call('ZRANGEBYLEX', IDX, '[' .. replica .. SEP, '(' .. replica .. AFTER)
end

local function rid_of(entry) return string.match(entry, '([^\31]*)$') end

local function rids_of(entries)
  local rids = {}
  for i, entry in ipairs(entries) do rids[i] = rid_of(entry) end
  return rids
end
