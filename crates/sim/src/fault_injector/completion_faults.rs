//! Completion faults: duplicate, bogus, dropped, delayed and altered completions.
//!
//! The position of a completion in the ring may differ between the controller and the host. Each
//! ring has a [`RingView`] that translates the head doorbell of the host for the controller.

use tenmil_base::Instant;

use super::{BogusCid, Fault, FaultInjector, InjectionPoint, QueueKind, ReleaseTrigger};
use crate::buffer_ownership::BufferOwnership;

/// A completion about to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmittedCompletion {
    /// The four dwords. The Phase Tag is set by the view of the ring.
    pub entry: [u32; 4],
    /// The device has not finished the command with this identifier.
    pub is_invalid: bool,
    /// It is posted with the inverted Phase Tag.
    pub wrong_phase: bool,
}

/// A completion ring as seen by the host and by the controller.
#[derive(Clone, Copy, Debug)]
pub struct RingView {
    depth: u32,
    /// Position at which the host expects the next completion.
    tail: u32,
    phase: bool,
    /// Position at which the controller posts the next completion.
    inner_tail: u32,
    /// Head of the host as reported to the controller.
    inner_head: u32,
    /// Head that the host has written.
    host_head: u32,
}

/// A completion that is held back.
#[derive(Clone, Copy, Debug)]
pub(super) struct WithheldCompletion {
    sqid: u16,
    entry: [u32; 4],
    until: ReleaseCondition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseCondition {
    At(Instant),
    Aborted,
    Enabled(u32),
}

const PHASE: u32 = 1 << 16;
/// Abort (Base 2.1 §5.1.1).
const ABORT: u8 = 0x08;

impl FaultInjector {
    /// Decides what is posted for a completion of the controller.
    pub fn on_completion(
        &mut self,
        now: Instant,
        depth: u32,
        entry: [u32; 4],
        ledger: &BufferOwnership,
    ) -> Vec<EmittedCompletion> {
        let (sqid, cid) = (high_u16(entry[2]), low_u16(entry[3]));
        self.heads.insert(sqid, low_u16(entry[2]));
        // Completed by a fault before: the real completion is discarded.
        if let Some(index) = self.completed.iter().position(|known| *known == (sqid, cid)) {
            self.completed.swap_remove(index);
            return Vec::new();
        }
        let command = ledger.owned_command(sqid, cid);
        let opcode = command.map(|command| command.opcode);
        let queue = if sqid == 0 { QueueKind::Admin } else { QueueKind::Io };
        match queue {
            QueueKind::Admin => self.counters.admin_completions += 1,
            _ => self.counters.io_completions += 1,
        }
        let mut emissions =
            self.alter_completion(now, InjectionPoint { queue, opcode }, depth, entry, ledger);
        // The completion of an Abort releases a held completion of its command.
        if sqid == 0 && opcode == Some(ABORT) {
            let target = command.map_or(0, |command| command.cdw10);
            for held in &mut self.held {
                if held.until == ReleaseCondition::Aborted
                    && held.is_for_command(low_u16(target), high_u16(target))
                {
                    held.until = ReleaseCondition::At(now);
                }
            }
        }
        // Held completions of the previous session precede the first one of the new session.
        if sqid != 0 {
            let enables = self.counters.enables;
            let from_the_grave = self.release_withheld(|held| {
                held.sqid == sqid
                    && matches!(held.until, ReleaseCondition::Enabled(at) if enables >= at)
            });
            let lies = from_the_grave
                .into_iter()
                .map(|stale| EmittedCompletion { is_invalid: true, ..stale });
            emissions.splice(0..0, lies);
        }
        emissions
    }

    /// Held completions that are due, with their submission queue. Except for the delay they are
    /// correct: SQHD is updated to the current head.
    pub fn take_released_completions(&mut self, now: Instant) -> Vec<(u16, EmittedCompletion)> {
        let released = self
            .release_withheld(|held| matches!(held.until, ReleaseCondition::At(at) if now >= at));
        let with_head = |mut emission: EmittedCompletion| {
            let sqid = high_u16(emission.entry[2]);
            if let Some(head) = self.heads.get(&sqid) {
                emission.entry[2] = u32::from(sqid) << 16 | u32::from(*head);
            }
            (sqid, emission)
        };
        released.into_iter().map(with_head).collect()
    }

    /// Handles the fetch of an admin command. Some are completed without the controller.
    pub fn on_admin_command(
        &mut self,
        now: Instant,
        opcode: u8,
        cid: u16,
    ) -> Option<EmittedCompletion> {
        let site = InjectionPoint { queue: QueueKind::Admin, opcode: Some(opcode) };
        let is_wanted = |fault: &Fault| matches!(fault, Fault::Event { .. });
        let Fault::Event { result, status } = self.take_due_fault(now, site, is_wanted)? else {
            return None;
        };
        self.completed.push((0, cid));
        let head = self.heads.get(&0).copied().unwrap_or(0);
        let entry = [result, 0, head.into(), u32::from(status) << 17 | u32::from(cid)];
        Some(EmittedCompletion { entry, is_invalid: false, wrong_phase: false })
    }

    /// Handles a reset: completions held for a time or for an Abort are discarded.
    pub fn on_disable(&mut self) {
        self.held.retain(|held| matches!(held.until, ReleaseCondition::Enabled(_)));
        self.completed.clear();
    }

    fn alter_completion(
        &mut self,
        now: Instant,
        site: InjectionPoint,
        depth: u32,
        entry: [u32; 4],
        ledger: &BufferOwnership,
    ) -> Vec<EmittedCompletion> {
        let honest = EmittedCompletion { entry, is_invalid: false, wrong_phase: false };
        let is_wanted = |fault: &Fault| {
            use Fault::{Bogus, Duplicate, Flood, Head, Hold, QueueId, Reserved, Result, Status};
            matches!(
                fault,
                Duplicate
                    | Bogus(_)
                    | Fault::WrongPhase
                    | Fault::Drop
                    | Hold(_)
                    | Status(_)
                    | Result(_)
                    | Head(_)
                    | QueueId(_)
                    | Reserved
                    | Flood
            )
        };
        let [result, reserved, head, status] = entry;
        let with = |entry| vec![EmittedCompletion { entry, ..honest }];
        match self.take_due_fault(now, site, is_wanted) {
            Some(Fault::Duplicate) => vec![honest, honest],
            Some(Fault::Bogus(invented)) => self
                .invent_completion(invented, entry, ledger)
                .into_iter()
                .chain([honest])
                .collect(),
            Some(Fault::WrongPhase) => vec![EmittedCompletion { wrong_phase: true, ..honest }],
            Some(Fault::Drop) => Vec::new(),
            Some(Fault::Hold(release)) => {
                let until = match release {
                    ReleaseTrigger::After(span) => ReleaseCondition::At(now.after(span)),
                    ReleaseTrigger::Aborted => ReleaseCondition::Aborted,
                    ReleaseTrigger::Reset => ReleaseCondition::Enabled(self.counters.enables + 1),
                };
                self.held.push(WithheldCompletion { sqid: high_u16(head), entry, until });
                Vec::new()
            }
            Some(Fault::Status(code)) => {
                let drawn = low_u16(low_u32(self.random.next_u64())) & 0x7fff;
                let code = if code == u16::MAX { drawn.max(1) } else { code };
                with([result, reserved, head, status & 0x1_ffff | u32::from(code) << 17])
            }
            Some(Fault::Result(result)) => with([result, reserved, head, status]),
            Some(Fault::Head(ahead)) => {
                let moved = low_u16(head).wrapping_add(ahead);
                with([result, reserved, head & !0xffff | u32::from(moved), status])
            }
            Some(Fault::QueueId(sqid)) => {
                with([result, reserved, head & 0xffff | u32::from(sqid) << 16, status])
            }
            Some(Fault::Reserved) => with([result, u32::MAX, head, status]),
            Some(Fault::Flood) => vec![honest; depth as usize],
            _ => vec![honest],
        }
    }

    fn invent_completion(
        &self,
        invented: BogusCid,
        entry: [u32; 4],
        ledger: &BufferOwnership,
    ) -> Option<EmittedCompletion> {
        let (sqid, cid) = (high_u16(entry[2]), low_u16(entry[3]));
        let in_flight = ledger.commands_of(sqid);
        let (cid, is_invalid) = match invented {
            BogusCid::Outside => (0xfffe, false),
            BogusCid::Ended => {
                let ended = (0..u16::MAX).find(|cid| in_flight.iter().all(|(of, _)| of != cid));
                (ended?, false)
            }
            BogusCid::InFlight => (in_flight.iter().find(|(of, _)| *of != cid)?.0, true),
        };
        let entry = [entry[0], entry[1], entry[2], u32::from(cid)];
        Some(EmittedCompletion { entry, is_invalid, wrong_phase: false })
    }

    fn release_withheld(
        &mut self,
        is_due: impl Fn(&WithheldCompletion) -> bool,
    ) -> Vec<EmittedCompletion> {
        let due: Vec<WithheldCompletion> =
            self.held.iter().copied().filter(|held| is_due(held)).collect();
        self.held.retain(|held| !is_due(held));
        let emission = |held: WithheldCompletion| EmittedCompletion {
            entry: held.entry,
            is_invalid: false,
            wrong_phase: false,
        };
        due.into_iter().map(emission).collect()
    }
}

impl WithheldCompletion {
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.until {
            ReleaseCondition::At(at) => Some(at),
            ReleaseCondition::Aborted | ReleaseCondition::Enabled(_) => None,
        }
    }

    fn is_for_command(&self, sqid: u16, cid: u16) -> bool {
        self.sqid == sqid && low_u16(self.entry[3]) == cid
    }
}

impl RingView {
    /// Creates the view of a new ring.
    pub fn new(depth: u32) -> Self {
        Self { depth, tail: 0, phase: true, inner_tail: 0, inner_head: 0, host_head: 0 }
    }

    /// Number of entries.
    pub fn entry_count(&self) -> u32 {
        self.depth
    }

    /// Last head doorbell value of the host.
    pub fn host_head(&self) -> u32 {
        self.host_head
    }

    /// Records that the controller has posted at `index`.
    pub fn record_posted(&mut self, index: u32) {
        self.inner_tail = (index + 1) % self.depth;
    }

    /// Position of the next completion, and its dwords with the Phase Tag.
    pub fn next_host_entry(&mut self, emission: &EmittedCompletion) -> (u32, [u32; 4]) {
        let index = self.tail;
        let mut entry = emission.entry;
        entry[3] &= !PHASE;
        if self.phase != emission.wrong_phase {
            entry[3] |= PHASE;
        }
        self.tail += 1;
        if self.tail == self.depth {
            (self.tail, self.phase) = (0, !self.phase);
        }
        (index, entry)
    }

    /// Translates a head doorbell value for the controller. A value outside the ring is passed on
    /// unchanged.
    pub fn translate_head(&mut self, head: u32) -> u32 {
        if head >= self.depth {
            return head;
        }
        self.host_head = head;
        let unread = (self.tail + self.depth - head) % self.depth;
        let outstanding = (self.inner_tail + self.depth - self.inner_head) % self.depth;
        self.inner_head = (self.inner_tail + self.depth - unread.min(outstanding)) % self.depth;
        self.inner_head
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
pub(super) const fn low_u16(word: u32) -> u16 {
    word as u16
}

const fn high_u16(word: u32) -> u16 {
    low_u16(word >> 16)
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_u32(word: u64) -> u32 {
    word as u32
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Random, Span};

    use super::super::{BogusCid, Fault, FaultInjector, PlannedFault, ReleaseTrigger};
    use super::{EmittedCompletion, RingView};
    use crate::buffer_ownership::{BufferOwnership, DataDirection};

    const NOW: Instant = Instant { ns: 1 };
    /// Queue 1, command identifier 3, SQHD 4.
    const ENTRY: [u32; 4] = [0, 0, 0x0001_0004, 3];

    fn ownership_with_commands() -> BufferOwnership {
        let mut ledger = BufferOwnership::default();
        ledger.record_admin_ring(0x4000);
        ledger.record_stored_command(NOW, 0x4000, &[1, 0, 0, 0x5000, 0, 1, 0, 0], &[]);
        ledger.mark_in_use(9, &[(0x10_0000, 4096)], DataDirection::FromDevice);
        for cid in [3, 5] {
            ledger.record_stored_command(
                NOW,
                0x5000,
                &[cid << 16 | 2, 0, 0, 0x10_0000, 0, 0, 0, 0],
                &[0x10_0000],
            );
        }
        ledger
    }

    fn emitted_completions(fault: Fault) -> Vec<EmittedCompletion> {
        let mut evil =
            FaultInjector::new(&[PlannedFault::for_io_queues(fault).with_count(1)], Random::new(1));
        evil.on_completion(NOW, 8, ENTRY, &ownership_with_commands())
    }

    #[test]
    fn each_completion_fault_has_its_effect() {
        let honest = EmittedCompletion { entry: ENTRY, is_invalid: false, wrong_phase: false };
        let with = |entry| vec![EmittedCompletion { entry, ..honest }];
        assert_eq!(emitted_completions(Fault::Gone), [honest], "not a fault of completions");
        assert_eq!(emitted_completions(Fault::Duplicate), [honest; 2]);
        assert_eq!(emitted_completions(Fault::Drop), []);
        assert_eq!(
            emitted_completions(Fault::WrongPhase),
            [EmittedCompletion { wrong_phase: true, ..honest }]
        );
        assert_eq!(
            emitted_completions(Fault::Status(0x281)),
            with([0, 0, 0x0001_0004, 0x281 << 17 | 3])
        );
        assert_eq!(emitted_completions(Fault::Result(7)), with([7, 0, 0x0001_0004, 3]));
        assert_eq!(emitted_completions(Fault::Head(0xffff)), with([0, 0, 0x0001_0003, 3]));
        assert_eq!(emitted_completions(Fault::QueueId(2)), with([0, 0, 0x0002_0004, 3]));
        assert_eq!(emitted_completions(Fault::Flood).len(), 8);
        let invented = emitted_completions(Fault::Bogus(BogusCid::InFlight));
        assert_eq!(invented[0].entry[3], 5);
        assert!(invented[0].is_invalid && !invented[1].is_invalid);
        assert_eq!(emitted_completions(Fault::Bogus(BogusCid::Outside))[0].entry[3], 0xfffe);
        assert_eq!(emitted_completions(Fault::Bogus(BogusCid::Ended))[0].entry[3], 0);
    }

    #[test]
    fn withheld_completion_is_released_when_due() {
        let hold = |release| {
            let mut evil = FaultInjector::new(
                &[PlannedFault::for_io_queues(Fault::Hold(release)).with_count(1)],
                Random::new(1),
            );
            assert_eq!(evil.on_completion(NOW, 8, ENTRY, &ownership_with_commands()), []);
            evil
        };
        let mut evil = hold(ReleaseTrigger::After(Span { ns: 10 }));
        assert_eq!(evil.wake_at(), Instant { ns: 11 });
        assert_eq!(evil.take_released_completions(Instant { ns: 10 }), []);
        assert_eq!(evil.take_released_completions(Instant { ns: 11 })[0].1.entry, ENTRY);

        let mut evil = hold(ReleaseTrigger::Aborted);
        let mut ledger = ownership_with_commands();
        ledger.record_stored_command(NOW, 0x4000, &[0x0008, 0, 0, 0, 0, 0x0003_0001, 0, 0], &[]);
        assert_eq!(evil.on_completion(NOW, 8, [0; 4], &ledger).len(), 1);
        assert_eq!(
            evil.take_released_completions(NOW)[0].1.entry,
            ENTRY,
            "after the answer to the Abort"
        );

        let mut evil = hold(ReleaseTrigger::Reset);
        evil.count_cc_transitions(0, 1);
        let other = [0, 0, 0x0001_0001, 5];
        let both = evil.on_completion(NOW, 8, other, &ledger);
        assert_eq!(
            both.iter().map(|emission| emission.is_invalid).collect::<Vec<_>>(),
            [true, false]
        );
    }

    #[test]
    fn invented_event_is_posted_once_and_the_real_one_is_dropped() {
        let event = PlannedFault::for_all_commands(Fault::Event { result: 0x1234, status: 0 })
            .with_count(1);
        let mut evil = FaultInjector::new(&[event], Random::new(1));
        let invented = evil.on_admin_command(NOW, 0x0c, 6).unwrap();
        assert_eq!(invented.entry, [0x1234, 0, 0, 6]);
        assert_eq!(evil.on_completion(NOW, 8, [0, 0, 0, 6], &ownership_with_commands()), []);
        assert_eq!(evil.on_completion(NOW, 8, [0, 0, 0, 6], &ownership_with_commands()).len(), 1);
    }

    /// With duplicate and dropped completions, the head reported to the controller never passes its
    /// tail, and after the host has read everything both are equal.
    #[test]
    fn controller_receives_a_valid_head() {
        let mut random = Random::new(4);
        for _ in 0..200 {
            let mut view = RingView::new(8);
            let (mut host_head, mut inner_tail, mut inner_head) = (0, 0, 0);
            for _ in 0..50 {
                view.record_posted(inner_tail);
                inner_tail = (inner_tail + 1) % 8;
                for _ in 0..random.below(3) {
                    view.next_host_entry(&EmittedCompletion {
                        entry: ENTRY,
                        is_invalid: false,
                        wrong_phase: false,
                    });
                }
                if random.chance(1, 2) || (inner_tail + 1) % 8 == inner_head {
                    let moves = (view.tail + 8 - host_head) % 8;
                    host_head = (host_head + moves) % 8;
                    let driver_events = view.translate_head(host_head);
                    let before = (inner_tail + 8 - inner_head) % 8;
                    let after = (inner_tail + 8 - driver_events) % 8;
                    assert!(after <= before, "a head never runs backwards");
                    assert_eq!(after, 0, "the host has read everything");
                    inner_head = driver_events;
                }
            }
        }
    }
}
