//! Plan of a round, derived from the seed and the number of the round.

use std::collections::BTreeMap;
use std::fmt;

use tenmil_base::Random;

use super::volatile_cache_disk::SurvivingData;

/// Stack below the NBD export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DeviceStack {
    /// A volume of a pool on one target.
    Store,
    /// A volume of a pool on a mirror of two targets.
    StoreOverMirror,
    /// A mirror of two targets.
    Mirror,
}

impl DeviceStack {
    pub(super) const ALL: [Self; 3] = [Self::Store, Self::StoreOverMirror, Self::Mirror];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Store => "pool",
            Self::StoreOverMirror => "pool-mirror",
            Self::Mirror => "mirror",
        }
    }

    pub(super) fn has_pool(self) -> bool {
        self != Self::Mirror
    }

    pub(super) fn target_count(self) -> usize {
        if self == Self::Store { 1 } else { 2 }
    }

    /// What can happen to it.
    pub(super) fn possible_events(self) -> impl Iterator<Item = CrashEvent> {
        let fits =
            move |event: &CrashEvent| self.target_count() > 1 || *event != CrashEvent::LegThenAll;
        CrashEvent::ALL.into_iter().filter(fits)
    }
}

/// Event at the chosen sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CrashEvent {
    /// A target is killed; its disk keeps all data.
    KillTarget,
    /// A target is killed and its disk loses power.
    PowerTarget,
    /// The process that has the volume or the mirror open is killed.
    KillHost,
    /// All processes are killed; the disks keep all data.
    KillAll,
    /// All processes are killed and all disks lose power.
    PowerAll,
    /// A sync fails and the disk loses unsynced data.
    FailedSync,
    /// A write is delayed by its disk, while the process that sent it is killed and restarted.
    HeldWrite,
    /// One leg of a mirror loses power, and later everything else does. All restart at once.
    LegThenAll,
}

impl CrashEvent {
    const ALL: [Self; 8] = [
        Self::KillTarget,
        Self::PowerTarget,
        Self::KillHost,
        Self::KillAll,
        Self::PowerAll,
        Self::FailedSync,
        Self::HeldWrite,
        Self::LegThenAll,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::KillTarget => "kill-target",
            Self::PowerTarget => "power-target",
            Self::KillHost => "kill-host",
            Self::KillAll => "kill-all",
            Self::PowerAll => "power-all",
            Self::FailedSync => "failed-sync",
            Self::HeldWrite => "held-write",
            Self::LegThenAll => "leg-then-all",
        }
    }

    /// Whether the process that has the volume open is killed.
    pub(super) fn kills_host(self) -> bool {
        !matches!(self, Self::KillTarget | Self::PowerTarget | Self::FailedSync)
    }
}

/// Plan of a round.
#[derive(Clone, Debug)]
pub(super) struct RoundPlan {
    pub(super) round: u64,
    pub(super) stack: DeviceStack,
    pub(super) event: CrashEvent,
    /// The affected target, if only one is.
    pub(super) leg: usize,
    /// Number of the sync, or write, of the event.
    pub(super) at: u64,
    /// Number of the sync of the other leg at which the second event occurs.
    pub(super) then_at: u64,
    /// Whether the event occurs after the sync was executed.
    pub(super) after: bool,
    pub(super) keep: SurvivingData,
    /// Delay in milliseconds before a killed target is restarted.
    pub(super) back_after_ms: u64,
    pub(super) operations: u64,
    pub(super) depth: usize,
    pub(super) snapshot: bool,
    /// Seed of the operations.
    pub(super) seed: u64,
}

/// Iterator over the syncs of the rounds, for each stack and event.
#[derive(Debug, Default)]
pub(super) struct SyncPositionIterator {
    next: BTreeMap<(DeviceStack, CrashEvent), u64>,
    /// Maximum number of syncs of one disk in a round.
    seen: BTreeMap<DeviceStack, u64>,
}

/// Assumed number of syncs before the first round.
const SEEN_FIRST: u64 = 24;

impl SyncPositionIterator {
    /// Records the number of syncs of a round.
    pub(super) fn record_syncs(&mut self, stack: DeviceStack, syncs: u64) {
        let seen = self.seen.entry(stack).or_insert(SEEN_FIRST);
        *seen = syncs.max(*seen);
    }

    pub(super) fn plan_round(
        &mut self,
        seed: u64,
        round: u64,
        stack: DeviceStack,
        only: Option<CrashEvent>,
    ) -> RoundPlan {
        let mut random = Random::new(seed ^ round.rotate_left(32));
        random.next_u64();
        let events: Vec<CrashEvent> = stack.possible_events().collect();
        let drawn = events[usize::try_from(random.below(events.len() as u64)).unwrap_or(0)];
        let event = only.filter(|event| events.contains(event)).unwrap_or(drawn);
        let next = self.next.entry((stack, event)).or_default();
        let seen = self.seen.get(&stack).copied().unwrap_or(SEEN_FIRST);
        // The stride has no common divisor with most counts, so that few rounds cover all parts.
        let at = 1 + *next * 7 % seen;
        *next += 1;
        let leg = usize::try_from(random.below(stack.target_count() as u64)).unwrap_or(0);
        RoundPlan {
            round,
            stack,
            event,
            leg,
            at: if event == CrashEvent::HeldWrite { 1 + random.below(60) } else { at },
            then_at: 1 + random.below(20),
            after: random.chance(1, 2),
            keep: SurvivingData::draw_random(&mut random),
            back_after_ms: if random.chance(1, 2) { 0 } else { random.below(400) },
            operations: 60 + random.below(100),
            depth: usize::try_from(1 + random.below(6)).unwrap_or(1),
            snapshot: stack.has_pool() && random.chance(1, 4),
            seed: random.next_u64(),
        }
    }
}

impl RoundPlan {
    /// Whether no request may fail and no data may be lost, because the other leg is intact.
    pub(super) fn must_lose_nothing(&self) -> bool {
        self.stack.target_count() > 1 && !self.event.kills_host()
    }
}

impl fmt::Display for RoundPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { round, stack, event, leg, at, keep, back_after_ms, .. } = self;
        let target = ["A", "B"][*leg];
        let what = if *event == CrashEvent::HeldWrite { "write" } else { "sync" };
        let moment = if self.after { "after" } else { "before" };
        write!(out, "round {round}: {} {} at target {target}, ", stack.name(), event.name())?;
        write!(out, "{moment} {what} {at}, keep {keep:?}, back after {back_after_ms} ms")?;
        if *event == CrashEvent::LegThenAll {
            write!(out, ", the rest at sync {}", self.then_at)?;
        }
        if self.snapshot { out.write_str(", with a snapshot") } else { Ok(()) }
    }
}

/// Parses the name of an event.
pub(super) fn parse_event(name: &str) -> Result<CrashEvent, String> {
    let known = CrashEvent::ALL.map(CrashEvent::name);
    let found = CrashEvent::ALL.into_iter().find(|event| event.name() == name);
    found.ok_or_else(|| format!("event '{name}': expected one of {}", known.join(", ")))
}

/// Parses the name of a stack.
pub(super) fn parse_stack(name: &str) -> Result<DeviceStack, String> {
    let known = DeviceStack::ALL.map(DeviceStack::name);
    let found = DeviceStack::ALL.into_iter().find(|stack| stack.name() == name);
    found.ok_or_else(|| format!("stack '{name}': expected one of {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sync_of_a_round_is_reached() {
        let mut walk = SyncPositionIterator::default();
        let at = (0..SEEN_FIRST).map(|round| {
            walk.plan_round(1, round, DeviceStack::Mirror, Some(CrashEvent::KillTarget)).at
        });
        let mut met: Vec<u64> = at.collect();
        met.sort_unstable();
        assert_eq!(met, (1..=SEEN_FIRST).collect::<Vec<_>>());
    }

    #[test]
    fn single_target_has_no_second_leg_and_names_parse_back() {
        let mut walk = SyncPositionIterator::default();
        for round in 0..200 {
            let plan = walk.plan_round(1, round, DeviceStack::Store, None);
            assert!(
                plan.leg == 0 && plan.event != CrashEvent::LegThenAll && !plan.must_lose_nothing()
            );
        }
        assert!(CrashEvent::ALL.into_iter().all(|known| parse_event(known.name()) == Ok(known)));
        assert!(DeviceStack::ALL.into_iter().all(|known| parse_stack(known.name()) == Ok(known)));
    }
}
