//! Fused compare and write (Base 2.1 §3.4.2, NVM 1.1 §2.1.3).
//!
//! The second half must be the next entry of the same submission queue. A pair runs alone: after
//! everything this queue has taken before it, with nothing taken behind it, and while the other
//! queues of the subsystem are quiet in its namespace (see [`Floor`](super::Floor)).

use base::{HostMemory, Instant, Span};
use wire::{Command, Fuse, IoOpcode, Status};

use super::Queue;
use super::admit::Plan;
use super::area::Wait;
use super::floor::Heard;
use super::job::Event;
use super::slot::State;

/// A fused pair.
#[derive(Debug)]
pub(super) struct Pair {
    first: u16,
    second: u16,
    nsid: u32,
    /// When it gives up waiting for its turn.
    begin_by: Instant,
    is_running: bool,
}

/// How long a pair waits to be alone: what runs beside it takes a fraction of that, or hangs.
const ALONE_MAX: Span = Span::from_secs(5);

impl<H: HostMemory> Queue<H> {
    /// Takes a command that follows or begins a fused pair. False means that it is held.
    pub(super) fn admit_fused(&mut self, now: Instant, index: usize, command: Command) -> bool {
        let first = self.submissions[index].first;
        match (first, command.fuse()) {
            (None, Fuse::First) => {
                if let Some(slot) = self.take_slot(index, &command, State::Parked) {
                    self.submissions[index].first = Some((slot, command));
                    self.paused += 1;
                }
                true
            }
            (Some((slot, first)), Fuse::Second) => {
                self.admit_pair(now, index, (slot, first), command)
            }
            (Some((slot, _)), _) => {
                self.unpark(index);
                self.complete(slot, Status::ABORTED_MISSING_FUSED, 0);
                self.admit(now, index, command)
            }
            (None, _) => {
                self.refuse(index, &command, Status::ABORTED_MISSING_FUSED);
                true
            }
        }
    }

    /// A first half no longer waits for its second.
    pub(super) fn unpark(&mut self, index: usize) {
        if self.submissions[index].first.take().is_some() {
            self.paused -= 1;
        }
    }

    /// Starts the pair if it is its turn. One whose turn does not come ends, to be tried again by its
    /// host: whoever is in the way hangs, and so would everybody who waits for this pair.
    pub(super) fn try_pair(&mut self, now: Instant) {
        let Some(pair) = self.pair.as_mut().filter(|pair| !pair.is_running) else { return };
        let first = pair.first;
        if self.slots.taken() == self.paused && self.voice.is_alone_with(pair.nsid) {
            pair.is_running = true;
            // Both run from now on; of other submission queues' halves, none does.
            self.paused -= 2;
            self.drive(now, first, Event::Begin);
        } else if now >= pair.begin_by {
            self.finish(now, first, Status::COMMAND_INTERRUPTED, 0);
        }
    }

    /// Takes what may be taken while somebody has the floor of the subsystem.
    #[cold]
    pub(super) fn fetch_beside(&mut self, now: Instant, takes_none: bool) -> u32 {
        let (nsid, barred) = match self.voice.hear() {
            Heard::Nobody => (None, None),
            Heard::News(nsid) => (Some(nsid), None),
            Heard::Known(nsid) => (Some(nsid), Some(nsid)),
        };
        let taken = if takes_none { 0 } else { self.fetch(now, barred) };
        if nsid.is_some_and(|nsid| self.is_quiet_in(nsid)) {
            self.voice.tell_quiet();
        }
        taken
    }

    /// Whether nothing runs in a namespace. Halves of pairs that wait do not.
    fn is_quiet_in(&mut self, nsid: u32) -> bool {
        let Self { slots, areas, directory, .. } = self;
        let mut there = slots.iter().filter(|(_, slot)| directory.nsid_of(slot.channel()) == nsid);
        there.all(|(_, slot)| match slot.state() {
            State::Free | State::Parked => true,
            State::Fast => false,
            State::Slow => areas.get(slot.area).wait == Wait::Pair,
        })
    }

    /// The command in area `index` has ended, which may be half of the pair.
    pub(super) fn pair_ended(&mut self, now: Instant, index: u16, status: Status) {
        let Some(Pair { first, second, is_running, .. }) = self.pair else { return };
        if index == first {
            if !is_running {
                self.paused -= 2;
            }
            match status.is_success() {
                true => self.drive(now, second, Event::Begin),
                false => self.finish(now, second, Status::ABORTED_FAILED_FUSED, 0),
            }
        } else if index == second {
            self.pair = None;
            self.voice.yield_floor();
        }
    }

    /// The area of the first half, if the pair has not begun.
    pub(super) fn waiting_pair(&self) -> Option<u16> {
        self.pair.as_ref().filter(|pair| !pair.is_running).map(|pair| pair.first)
    }

    fn admit_pair(
        &mut self,
        now: Instant,
        index: usize,
        (slot, first): (u16, Command),
        second: Command,
    ) -> bool {
        if self.pair.is_some() || self.areas.room() < 2 {
            self.held = Some((index, second));
            return false;
        }
        let plans = self.plan_pair(&first, &second);
        let (nsid, begin_by) = (first.nsid(), now.after(ALONE_MAX));
        self.unpark(index);
        let Some(second_slot) = self.take_slot(index, &second, State::Slow) else { return true };
        match plans {
            Err((status, second_status)) => {
                self.complete(slot, status, 0);
                self.complete(second_slot, second_status, 0);
            }
            Ok([first_plan, second_plan]) => {
                let areas = [
                    self.take_area(slot, first, first_plan),
                    self.take_area(second_slot, second, second_plan),
                ];
                if let [Some(first), Some(second)] = areas {
                    self.areas.get(first).wait = Wait::Pair;
                    self.areas.get(second).wait = Wait::Pair;
                    self.pair = Some(Pair { first, second, nsid, begin_by, is_running: false });
                    self.paused += 2;
                    self.try_pair(now);
                }
            }
        }
        true
    }

    /// Checks both halves. If one is refused, the other is told so (Base 2.1 §4.2.3.1).
    fn plan_pair(
        &mut self,
        first: &Command,
        second: &Command,
    ) -> Result<[Plan; 2], (Status, Status)> {
        let opcodes = (IoOpcode::from_u8(first.opcode()), IoOpcode::from_u8(second.opcode()));
        let is_known = opcodes == (Some(IoOpcode::Compare), Some(IoOpcode::Write));
        // "The LBA range shall be the same": NSID, SLBA and NLB.
        let is_same = first.nsid() == second.nsid()
            && first.0[5] == second.0[5]
            && first.cdw12() & 0xffff == second.cdw12() & 0xffff;
        if !is_known || !is_same {
            let status = Status::INVALID_FIELD.with_dnr();
            return Err((status, status));
        }
        let failed = Status::ABORTED_FAILED_FUSED;
        let first = self.plan_command(first).map_err(|status| (status, failed))?;
        let second = self.plan_command(second).map_err(|status| (failed, status))?;
        Ok([first, second])
    }
}
