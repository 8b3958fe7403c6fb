//! Errors on purpose, per opcode, to see what the layers above make of them.
//!
//! While any injection is armed the queue pair keeps its slots shut away, so that every command
//! takes the long way through here. While none is, there is nothing on the way of an I/O to ask.

use base::{Answers, Dma, Doorbell, Outcome};
use wire::Command;

use super::completions::end_special;
use super::{Parents, QueuePair};
use crate::link::Order;
use crate::slot::Mark;

/// An error to be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Which commands are hit.
    pub opcode: u8,
    /// At which end.
    pub side: InjectionSide,
    /// How they end.
    pub outcome: Outcome,
    /// How many of them are hit.
    pub count: u32,
}

/// Where an injected error takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectionSide {
    /// The controller never sees the command.
    Submission,
    /// The controller executes the command, and its own outcome is replaced.
    Completion,
}

/// The injections of a queue pair.
#[derive(Debug)]
pub(super) struct Injections {
    list: Vec<Injection>,
    /// Commands that were not sent, with the outcome they get at the next poll.
    unsent: Vec<(u16, Outcome)>,
    /// By slot: the outcome of a marked command.
    outcomes: Box<[Outcome]>,
    count: u64,
}

impl Injections {
    fn new(slots: usize) -> Self {
        Self {
            list: Vec::new(),
            unsent: Vec::with_capacity(slots),
            outcomes: vec![Outcome::SUCCESS; slots].into_boxed_slice(),
            count: 0,
        }
    }

    pub(super) fn are_armed(&self) -> bool {
        !self.list.is_empty() || !self.unsent.is_empty()
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The injection that hits `opcode`, used up by one.
    fn next_for(&mut self, opcode: u8) -> Option<Injection> {
        let index = self.list.iter().position(|injection| injection.opcode == opcode)?;
        let injection = &mut self.list[index];
        injection.count -= 1;
        let hit = *injection;
        if hit.count == 0 {
            self.list.remove(index);
        }
        self.count += 1;
        Some(hit)
    }
}

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    /// From now on, as many commands as it says end as it says. Halves of fused pairs are spared.
    pub fn inject(&mut self, injection: Injection) {
        let slots = self.slots.len();
        let injections = self.cold.injections.get_or_insert_with(|| Injections::new(slots));
        if injection.count > 0 {
            injections.list.push(injection);
        }
        self.be_ordinary_if_so();
    }

    /// No more commands are hit; those that were are still answered so.
    pub fn clear_injections(&mut self) {
        if let Some(injections) = &mut self.cold.injections {
            injections.list.clear();
        }
        self.be_ordinary_if_so();
    }

    /// The long way into the ring: there was no free slot, or so it seemed.
    #[cold]
    pub(super) fn enqueue_injected(
        &mut self,
        tick: u32,
        token: u64,
        mark: Mark,
        mut command: Command,
    ) -> Option<u16> {
        let injections = self.cold.injections.as_mut()?;
        if !self.slots.is_closed() || self.cold.standing != Order::Run {
            return None;
        }
        self.slots.next_index()?;
        let hit = injections.next_for(command.opcode());
        self.slots.open();
        let mark = if hit.is_some() { mark.and(Mark::INJECTED) } else { mark };
        let cid = self.slots.take(token, tick, mark);
        self.slots.close();
        let cid = cid?;
        if let Some(hit) = hit {
            injections.outcomes[self.slots.index(cid)] = hit.outcome;
            if hit.side == InjectionSide::Submission {
                injections.unsent.push((cid, hit.outcome));
                return Some(cid);
            }
        }
        command.0[0] |= u64::from(cid) << 16;
        self.put(&command);
        if self.is_eager {
            self.prefetch_and_ring();
        }
        Some(cid)
    }

    /// Answers the commands that were not sent, as far as there is room.
    pub(super) fn answer_injected<P: Parents>(&mut self, answers: &mut Answers, parents: &mut P) {
        let Some(injections) = &mut self.cold.injections else { return };
        let count = injections.unsent.len().min(answers.room());
        for (cid, outcome) in injections.unsent.drain(..count) {
            if let Ok(ended) = self.slots.complete(cid) {
                end_special(ended, outcome, 0, parents).into_iter().for_each(|it| answers.push(it));
            }
        }
    }

    pub(super) fn has_injected_answers(&self) -> bool {
        self.cold.injections.as_ref().is_some_and(|injections| !injections.unsent.is_empty())
    }

    /// They are answered with everything else that was in flight.
    pub(super) fn forget_injected_answers(&mut self) {
        if let Some(injections) = &mut self.cold.injections {
            injections.unsent.clear();
        }
    }

    /// The outcome of a completed command after injection.
    pub(super) fn injected_outcome(&self, cid: u16, mark: Mark, outcome: Outcome) -> Outcome {
        match &self.cold.injections {
            Some(injections) if mark.has(Mark::INJECTED) => {
                injections.outcomes[self.slots.index(cid)]
            }
            _ => outcome,
        }
    }
}
