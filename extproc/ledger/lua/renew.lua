-- renew: a batch of periodic records; each renews a lease or rebuilds a reservation the ledger lost.
-- KEYS as in _lib.lua. ARGV[2]: {{rid, R, lease_us, seen_age_us, first_age_us or -1, current_blocks or -1}, ...};
--   R is a whole record whose lease, seen, first byte and current blocks this script fills in.
-- Result: {1 | 0, ...}: 0 where the rid had ended (or its record is older than a tombstone lives).
-- Invariant: an ended rid is never revived; a live one keeps its stock, or has it raised to current_blocks; one that
--   changed its replica leaves its blocks cooling on the old one.
local now = clock()
local epoch, loss = pool(now)
local ups, answers = unpack_one(ARGV[2]), {}

local function over(replica, s, column, before)
  local p = rep_of(replica)
  if p and p[P_CAPACITY] >= 0 then
    local committed = s[S_KV] + max(0, p[P_FOREIGN])
    if committed > p[P_CAPACITY] and s[S_KV] > before then s[column] = s[column] + 1 end
  end
end

local function grow(rid, r, blocks)
  if blocks <= r[CURRENT] then return end
  local s = sum_of(r[REPLICA])
  local before = s[S_KV]
  leave(IDX, index_entry(rid, r))
  add_stock(r, -1)
  r[CURRENT] = blocks
  add_stock(r, 1)
  enter(IDX, index_entry(rid, r), 0)
  over(r[REPLICA], s, S_OVER_GREW, before)
end

local function adopt(rid, r)
  local before = sum_of(r[REPLICA])[S_KV]
  local s = insert(rid, r)
  over(r[REPLICA], s, S_OVER_ADOPTED, before)
end

-- The attempt on the old replica may still be running there: its share cools under an id of its own.
local function move(rid, old, new)
  release(rid, old, 'moved', now, now)
  leave(ENDED, old[REPLICA] .. SEP .. stamp(now) .. SEP .. rid)
  local ghost = rid .. '~' .. old[REPLICA]
  for i = 1, #old[VRAM], 2 do
    local bytes = format('%d', old[VRAM][i + 1])
    settle_vram(old[VRAM][i], old[VRAM][i] .. SEP .. rid .. SEP .. bytes, bytes)
  end
  if not record_of(ghost) then
    old[STATE], old[ENDED_AT], old[HOW], old[LEASE] = 'c', now, 'moved', now + GRACE_US
    insert(ghost, old)
    joins[old[OWNER] .. SEP .. old[REQUEST]] = false
  end
  adopt(rid, new)
end

local rids = {}
for i, u in ipairs(ups) do rids[i] = u[1] end
fetch(rids)
for i, u in ipairs(ups) do
  local rid, r, seen = u[1], u[2], now - max(0, u[4])
  local first = u[5] >= 0 and now - u[5] or -1
  local old = record_of(rid)
  answers[i] = 1
  if seen < now - TOMBSTONE_US or (old and (old[STATE] == 't' or old[STATE] == 'c')) then
    answers[i] = 0
  else
    r[MADE], r[CURRENT], r[LEASE], r[SEEN], r[FIRST] = min(r[MADE], now), max(r[KV], u[6]), seen + u[3], seen, first
    if not old then
      adopt(rid, r)
    elseif old[REPLICA] ~= r[REPLICA] then
      if seen > old[SEEN] then move(rid, old, r) end
    else
      grow(rid, old, u[6])
      unorphan(rid, old)
      old[STATE] = 'r'
      old[LEASE], old[SEEN] = max(old[LEASE], seen + u[3]), max(old[SEEN], seen)
      if first >= 0 and (old[FIRST] < 0 or first < old[FIRST]) then old[FIRST] = first end
      keep(rid, old)
      enter(DUE, rid, old[LEASE])
    end
  end
end
flush()
return pack(answers)
