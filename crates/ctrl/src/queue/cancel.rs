//! Ending commands before their time: abort, preemption, deletion of a queue, and stopping all.
//!
//! A command that a medium or the host may still answer keeps its memory until it has been answered;
//! only what is said to the host about it changes.

use base::{HostMemory, Instant};
use wire::{IoOpcode, Status};

use super::Queue;
use super::area::Wait;
use super::channel;
use super::slot::{Slot, State};
use crate::controller::Preempted;

/// Writes of a namespace that were outstanding when its reservation was preempted.
#[derive(Debug)]
pub(super) struct PreemptedWrites {
    /// The preemption waits while this is there.
    _held: Preempted,
    commands: Vec<(u16, Slot)>,
}

impl<H: HostMemory> Queue<H> {
    /// Tries to abort a command (Base 2.1 §5.1.1). True if it ends, or will end, as aborted; a
    /// command that a medium is already working on, or that was never taken, is left alone.
    pub fn abort(&mut self, now: Instant, sqid: u16, cid: u16) -> bool {
        let Some(index) = self.submissions.iter().position(|queue| queue.id == sqid) else {
            return false;
        };
        if let Some((held_index, command)) = self.held
            && held_index == index
            && command.cid() == cid
        {
            // It has no slot yet: it is answered as soon as there is a place.
            if self.permits(1) == 1 {
                self.held = None;
                self.refuse(index, &command, Status::ABORT_REQUESTED);
                return true;
            }
            return false;
        }
        let is_it = |slot: &Slot| usize::from(slot.submission()) == index && slot.cid() == cid;
        let found = self.slots.iter().find(|(_, slot)| is_it(slot)).map(|(number, _)| number);
        found.is_some_and(|number| self.cancel(now, number, Status::ABORT_REQUESTED))
    }

    /// Ends what is outstanding on a namespace: its reservation was preempted, and the commands are
    /// to be aborted (Base 2.1 §8.1.22.7). `preempted` is held until the medium has answered what writes:
    /// see [`check_preempted`](Self::check_preempted).
    pub fn abort_namespace(&mut self, now: Instant, nsid: u32, preempted: &Preempted) {
        let numbers: Vec<u16> = self
            .slots
            .iter()
            .filter(|(_, slot)| self.directory.nsid_of(slot.channel()) == nsid)
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            self.cancel(now, number, Status::ABORTED_PREEMPT_AND_ABORT);
        }
        let is_writing =
            |slot: &Slot| writes(slot.opcode()) && self.directory.nsid_of(slot.channel()) == nsid;
        let writing = self.slots.iter().filter(|(_, slot)| is_writing(slot));
        let commands: Vec<_> = writing.map(|(number, slot)| (number, *slot)).collect();
        if !commands.is_empty() {
            self.preempted.push(PreemptedWrites { _held: preempted.clone(), commands });
        }
    }

    /// Looks which writes that were outstanding when a reservation was preempted have been answered, and
    /// lets go of preemptions that wait for none.
    pub fn check_preempted(&mut self) {
        let slots = &self.slots;
        self.preempted.retain_mut(|writes| {
            let is_there = |(number, old): &(u16, Slot)| {
                slots.get((*number).into()).is_some_and(|slot| slot.is_command(old))
            };
            writes.commands.retain(is_there);
            !writes.commands.is_empty()
        });
    }

    /// Takes nothing more from a submission queue; what was taken is answered.
    pub fn close_submission_queue(&mut self, now: Instant, sqid: u16) {
        let Some(index) = self.submissions.iter().position(|queue| queue.id == sqid) else {
            return;
        };
        self.submissions[index].is_closing = true;
        self.held.take_if(|(held_index, _)| *held_index == index);
        let of_it = |slot: &Slot| usize::from(slot.submission()) == index;
        let numbers: Vec<u16> =
            self.slots.iter().filter(|(_, slot)| of_it(slot)).map(|(number, _)| number).collect();
        for number in numbers {
            self.cancel(now, number, Status::ABORTED_SQ_DELETION);
        }
    }

    /// Removes a closed submission queue once all that was taken from it is answered. True if it is
    /// gone.
    pub fn remove_submission_queue(&mut self, sqid: u16) -> bool {
        let Some(index) = self.submissions.iter().position(|queue| queue.id == sqid) else {
            return true;
        };
        let queue = &self.submissions[index];
        if !queue.is_closing || queue.in_flight > 0 || queue.is_fetching() {
            return false;
        }
        self.submissions.remove(index);
        for number in self.slots.iter().map(|(number, _)| number).collect::<Vec<_>>() {
            let slot = self.slots.get_mut(number);
            let submission = slot.submission();
            slot.set_submission(submission - u16::from(usize::from(submission) > index));
        }
        if let Some((held_index, _)) = &mut self.held {
            *held_index -= usize::from(*held_index > index);
        }
        true
    }

    /// Stops: from now on the host's memory is not touched by anything that has not already been
    /// begun, and nothing is answered. Turn the queue until it [`is_drained`](Self::is_drained).
    pub fn stop(&mut self, now: Instant) {
        self.is_stopping = true;
        self.held = None;
        for index in 0..self.directory.channel_count() {
            let Some(channel) = self.directory.channel(index) else { continue };
            for token in channel.recall() {
                if self.slots.get(token).is_some_and(|slot| slot.state() == State::Fast)
                    && let Ok(number) = u16::try_from(token)
                {
                    self.complete(number, Status::ABORTED_SQ_DELETION, 0);
                }
            }
        }
        for number in self.slots.iter().map(|(number, _)| number).collect::<Vec<_>>() {
            if self.slots.get(number.into()).is_some() {
                self.cancel(now, number, Status::ABORTED_SQ_DELETION);
            }
        }
    }

    /// After [`stop`](Self::stop): closes the blocks that media still write for the host to everyone,
    /// until they have answered. The host gets no answer any more, and may send the same blocks again by
    /// another queue, which must not be overtaken.
    pub fn fence_writes(&mut self) {
        self.directory.channels().for_each(channel::Channel::fence_writes);
    }

    /// The command in the lowest place of those that are in flight: its opcode, namespace and block.
    pub fn first_outstanding(&self) -> Option<(u8, u32, u64)> {
        let (_, slot) = self.slots.iter().next()?;
        Some((slot.opcode(), self.directory.nsid_of(slot.channel()), slot.lba))
    }

    /// Whether nothing is in flight, at a medium or at the host. A queue that has been stopped may
    /// then be dropped, and its memory is its host's again.
    pub fn is_drained(&self) -> bool {
        self.slots.taken() == 0 && self.ring_accesses == 0
    }

    /// Whether nothing is in flight but first halves of pairs, which touch nothing before their second
    /// halves come. So it stays, once it is so, for as long as the queue is on hold.
    pub fn is_at_rest(&self) -> bool {
        let halves = self.submissions.iter().filter(|queue| queue.first.is_some()).count();
        self.slots.taken() == halves && self.ring_accesses == 0
    }

    /// Commands that have been taken and are worked on. Halves of fused pairs that wait are not.
    pub fn in_flight(&self) -> usize {
        self.slots.taken() - self.paused
    }

    /// Ends a command with `status`, now or once it is answered. False if it ends by itself.
    fn cancel(&mut self, now: Instant, number: u16, status: Status) -> bool {
        let Some(slot) = self.slots.get(number.into()).copied() else { return false };
        match slot.state() {
            State::Free | State::Fast => false,
            State::Parked => {
                self.unpark(slot.submission().into());
                self.complete(number, status, 0);
                true
            }
            State::Slow => {
                let waiting_pair = self.waiting_pair();
                let area = self.areas.get(slot.area);
                if area.wait == Wait::Controller && !self.is_stopping {
                    // What it changes may have been written down by now: it ends as it ends.
                    return false;
                }
                area.cancelled = Some(status);
                area.mover.abandon();
                let is_second = area.wait == Wait::Pair && waiting_pair != Some(slot.area);
                if !area.is_touched() && !is_second {
                    self.want_buffer.retain(|waiting| *waiting != slot.area);
                    self.want_room.retain(|waiting| *waiting != slot.area);
                    self.finish(now, slot.area, status, 0);
                }
                true
            }
        }
    }
}

/// Whether a command of this opcode changes blocks.
fn writes(opcode: u8) -> bool {
    matches!(
        IoOpcode::from_u8(opcode),
        Some(
            IoOpcode::Write
                | IoOpcode::WriteUncorrectable
                | IoOpcode::WriteZeroes
                | IoOpcode::DatasetManagement
                | IoOpcode::Copy
        )
    )
}
