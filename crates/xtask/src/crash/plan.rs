//! What happens in a round, drawn from the seed and the number of the round.

use std::collections::BTreeMap;
use std::fmt;

use base::Random;

use super::medium::Keep;

/// What the volume or the block device stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stack {
    /// A volume of a store over one target.
    Store,
    /// A volume of a store over a mirror of two targets.
    StoreOverMirror,
    /// A mirror of two targets.
    Mirror,
}

impl Stack {
    pub(super) const ALL: [Self; 3] = [Self::Store, Self::StoreOverMirror, Self::Mirror];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::StoreOverMirror => "store-mirror",
            Self::Mirror => "mirror",
        }
    }

    pub(super) fn has_store(self) -> bool {
        self != Self::Mirror
    }

    pub(super) fn targets(self) -> usize {
        if self == Self::Store { 1 } else { 2 }
    }

    /// What can happen to it.
    pub(super) fn events(self) -> impl Iterator<Item = Event> {
        let fits = move |event: &Event| self.targets() > 1 || *event != Event::LegThenAll;
        Event::ALL.into_iter().filter(fits)
    }
}

/// What happens at the chosen flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A target is killed; its disk goes on.
    KillTarget,
    /// A target is killed and its disk loses power.
    PowerTarget,
    /// The process that has the volume or the mirror open is killed.
    KillHost,
    /// All processes are killed; the disks go on.
    KillAll,
    /// All processes are killed and all disks lose power.
    PowerAll,
    /// A disk fails a sync and loses what was not synced.
    FailedSync,
    /// A write is held back by its disk, while the process that sent it is killed and started again.
    HeldWrite,
    /// One leg of a mirror loses power; later everything else does. All come back at once.
    LegThenAll,
}

impl Event {
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

/// One round.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) round: u64,
    pub(super) stack: Stack,
    pub(super) event: Event,
    /// The target that is hit, if only one is.
    pub(super) leg: usize,
    /// At which of its syncs, or writes.
    pub(super) at: u64,
    /// At which sync of the other leg the rest is hit.
    pub(super) then_at: u64,
    /// Whether the sync has taken place when it happens.
    pub(super) after: bool,
    pub(super) keep: Keep,
    /// After how many milliseconds a target that was killed is started again.
    pub(super) back_after_ms: u64,
    pub(super) operations: u64,
    pub(super) depth: usize,
    pub(super) snapshot: bool,
    /// Of the operations.
    pub(super) seed: u64,
}

/// Walks over the flushes of the rounds of each kind.
#[derive(Debug, Default)]
pub(super) struct Walk {
    next: BTreeMap<(Stack, Event), u64>,
    /// The most syncs that one disk had in a round.
    seen: BTreeMap<Stack, u64>,
}

/// Syncs of a round before one was seen.
const SEEN_FIRST: u64 = 24;

impl Walk {
    /// A round had so many syncs.
    pub(super) fn saw(&mut self, stack: Stack, syncs: u64) {
        let seen = self.seen.entry(stack).or_insert(SEEN_FIRST);
        *seen = syncs.max(*seen);
    }

    pub(super) fn plan(
        &mut self,
        seed: u64,
        round: u64,
        stack: Stack,
        only: Option<Event>,
    ) -> Plan {
        let mut random = Random::new(seed ^ round.rotate_left(32));
        random.draw();
        let events: Vec<Event> = stack.events().collect();
        let drawn = events[usize::try_from(random.below(events.len() as u64)).unwrap_or(0)];
        let event = only.filter(|event| events.contains(event)).unwrap_or(drawn);
        let next = self.next.entry((stack, event)).or_default();
        let seen = self.seen.get(&stack).copied().unwrap_or(SEEN_FIRST);
        // A stride without a common divisor with most counts, so that few rounds meet all parts.
        let at = 1 + *next * 7 % seen;
        *next += 1;
        let leg = usize::try_from(random.below(stack.targets() as u64)).unwrap_or(0);
        Plan {
            round,
            stack,
            event,
            leg,
            at: if event == Event::HeldWrite { 1 + random.below(60) } else { at },
            then_at: 1 + random.below(20),
            after: random.chance(1, 2),
            keep: Keep::draw(&mut random),
            back_after_ms: if random.chance(1, 2) { 0 } else { random.below(400) },
            operations: 60 + random.below(100),
            depth: usize::try_from(1 + random.below(6)).unwrap_or(1),
            snapshot: stack.has_store() && random.chance(1, 4),
            seed: random.draw(),
        }
    }
}

impl Plan {
    /// Whether nothing may be lost, and nobody may notice: the other leg has everything.
    pub(super) fn is_lossless(&self) -> bool {
        self.stack.targets() > 1 && !self.event.kills_host()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { round, stack, event, leg, at, keep, back_after_ms, .. } = self;
        let target = ["A", "B"][*leg];
        let what = if *event == Event::HeldWrite { "write" } else { "sync" };
        let moment = if self.after { "after" } else { "before" };
        write!(out, "round {round}: {} {} at target {target}, ", stack.name(), event.name())?;
        write!(out, "{moment} {what} {at}, keep {keep:?}, back after {back_after_ms} ms")?;
        if *event == Event::LegThenAll {
            write!(out, ", the rest at sync {}", self.then_at)?;
        }
        if self.snapshot { out.write_str(", with a snapshot") } else { Ok(()) }
    }
}

/// An event by its name.
pub(super) fn event(name: &str) -> Result<Event, String> {
    let known = Event::ALL.map(Event::name);
    let found = Event::ALL.into_iter().find(|event| event.name() == name);
    found.ok_or_else(|| format!("event '{name}': expected one of {}", known.join(", ")))
}

/// A stack by its name.
pub(super) fn stack(name: &str) -> Result<Stack, String> {
    let known = Stack::ALL.map(Stack::name);
    let found = Stack::ALL.into_iter().find(|stack| stack.name() == name);
    found.ok_or_else(|| format!("stack '{name}': expected one of {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sync_of_a_round_is_met() {
        let mut walk = Walk::default();
        let at = (0..SEEN_FIRST)
            .map(|round| walk.plan(1, round, Stack::Mirror, Some(Event::KillTarget)).at);
        let mut met: Vec<u64> = at.collect();
        met.sort_unstable();
        assert_eq!(met, (1..=SEEN_FIRST).collect::<Vec<_>>());
    }

    #[test]
    fn one_target_has_no_second_leg_and_names_are_found_again() {
        let mut walk = Walk::default();
        for round in 0..200 {
            let plan = walk.plan(1, round, Stack::Store, None);
            assert!(plan.leg == 0 && plan.event != Event::LegThenAll && !plan.is_lossless());
        }
        assert!(Event::ALL.into_iter().all(|known| event(known.name()) == Ok(known)));
        assert!(Stack::ALL.into_iter().all(|known| stack(known.name()) == Ok(known)));
    }
}
