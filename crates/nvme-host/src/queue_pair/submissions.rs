//! Submission side of a queue pair: from a command to its transport.

use tenmil_base::{Instant, Span};
use tenmil_wire::{Command, Fuse};

use super::{PointerOf, QueuePair, Transport};
use crate::queue_link::QueueState;
use crate::slot_table::{SlotFlags, tick_of};

impl<T: Transport> QueuePair<T> {
    /// Makes all submitted commands visible to the controller.
    #[inline]
    pub fn flush(&mut self) {
        self.transport.flush(self.slots.in_flight());
    }

    /// Applies a state change, if there is one. Called once per batch, before commands are stored.
    #[inline]
    pub(crate) fn check_state(&mut self, now: Instant) {
        if self.link.state_word() != self.ordinary {
            self.apply_state(now);
        }
    }

    /// Slot index of the next command, so that its list can be written first.
    pub(crate) fn next_index(&self) -> Option<usize> {
        self.slots.next_index()
    }

    /// Like [`next_index`](Self::next_index), for a fused pair.
    pub(crate) fn next_two_indexes(&self) -> Option<[usize; 2]> {
        self.slots.next_two_indexes()
    }

    /// Whether each command is sent at once, which [`enqueue`](Self::enqueue) does.
    #[inline]
    pub(crate) fn is_eager(&self) -> bool {
        self.transport.is_eager()
    }

    /// Flushes an [eager](Self::is_eager) queue.
    pub(super) fn flush_if_eager(&mut self) {
        if self.is_eager() {
            self.flush();
        }
    }

    /// Submits the results of `make` for `items`, each a token and a command with an identifier field of
    /// zero. Stops when `make` returns `None`, or when there is no free slot visible here
    /// ([`enqueue`](Self::enqueue) may still find one). Returns the number submitted.
    ///
    /// Inlined where it matters, so that commands are built in registers and stored once. Only for a
    /// queue that is not [eager](Self::is_eager).
    #[inline(always)]
    pub(crate) fn enqueue_each<I>(
        &mut self,
        tick: u32,
        items: &[I],
        mut make: impl FnMut(&I) -> Option<(u64, Command, PointerOf<T>)>,
    ) -> usize {
        let mut slots = self.slots.alloc_cursor();
        let count = self.transport.submit_each(
            items,
            #[inline(always)]
            |item| {
                let (token, Command(mut words), pointer) = make(item)?;
                words[0] |= u64::from(slots.reserve_simple(token, tick)?) << 16;
                Some((Command(words), pointer))
            },
        );
        slots.finish(count);
        count
    }

    /// Submits one command: to any queue, with flags, and returning the identifier.
    #[inline(never)]
    pub(crate) fn enqueue(
        &mut self,
        tick: u32,
        token: u64,
        mark: SlotFlags,
        (mut command, pointer): (Command, PointerOf<T>),
        lists: Option<&mut T::Pointers>,
    ) -> Option<u16> {
        let Some(cid) = self.slots.allocate(token, tick, mark) else {
            return self.enqueue_injected(tick, token, mark, (command, pointer), lists);
        };
        command.0[0] |= u64::from(cid) << 16;
        self.transport.submit(command, pointer, lists);
        self.flush_if_eager();
        Some(cid)
    }

    /// Like [`enqueue`](Self::enqueue), with an individual timeout.
    pub(crate) fn enqueue_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        entry: (Command, PointerOf<T>),
        lists: Option<&mut T::Pointers>,
    ) -> Option<u16> {
        let cid = self.enqueue(tick_of(now), token, SlotFlags::TIMED, entry, lists)?;
        self.set_timeout(now, cid, timeout);
        Some(cid)
    }

    /// Submits both commands of a fused operation, or neither.
    pub(crate) fn enqueue_fused(
        &mut self,
        tick: u32,
        mark: SlotFlags,
        first: (u64, Command, PointerOf<T>),
        second: (u64, Command, PointerOf<T>),
        mut lists: Option<&mut T::Pointers>,
    ) -> Option<[u16; 2]> {
        if self.slots.next_two_indexes().is_none() || self.cold.standing != QueueState::Running {
            return None;
        }
        // No flush between the two, whatever the options, and no injection into a pair.
        let was_closed = self.slots.is_closed();
        self.slots.open();
        let halves = [(first, Fuse::First), (second, Fuse::Second)];
        let cids = halves.map(|((token, command, pointer), fuse)| {
            let cid = self.slots.allocate(token, tick, mark)?;
            let command = command.with_fuse(fuse).with_cid(cid);
            self.transport.submit(command, pointer, lists.as_deref_mut());
            Some(cid)
        });
        if was_closed {
            self.slots.close();
        }
        self.flush_if_eager();
        match cids {
            [Some(first), Some(second)] => Some([first, second]),
            _ => unreachable!("two slots were free"),
        }
    }
}
