//! What a driver does with a completion, and nothing else: find the slot that it names and hand its
//! token out. In flight is what 21 devices at depth 128 have, and completions come in an order that
//! is not that of the slots.
//!
//! ```text
//!   Dense    | token | key |        16 bytes apart, four to a cache line
//!   Apart    | token | key | …      4 KiB apart: each with the list of pages behind it
//!   Behind   | where | key | ──▶ | token | …   the token is in a request, behind a pointer
//! ```

use base::Random;

/// Completions: the slots that they name, in the order in which they come.
#[derive(Debug)]
pub struct Ring {
    identifiers: Vec<u32>,
}

/// Slots in some layout.
pub trait Table {
    /// A table of so many slots.
    fn new(count: u32) -> Self;

    /// The token of a slot, whose key moves on.
    fn complete(&mut self, identifier: u32) -> u64;

    /// Says that a slot will be asked for soon.
    fn prefetch(&self, identifier: u32);
}

/// Sixteen bytes, the token beside its key.
#[derive(Debug)]
pub struct Dense(Vec<Slot>);

/// The same slots, a page apart.
#[derive(Debug)]
pub struct Apart(Vec<Page>);

/// Slots beside each other whose token is in a request elsewhere.
#[derive(Debug)]
pub struct Behind {
    slots: Vec<Pointing>,
    requests: Vec<Request>,
}

/// A loop over completions that asks for slots so many ahead.
#[derive(Clone, Copy, Debug)]
pub struct Ahead(pub usize);

#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Slot {
    token: u64,
    key: u64,
}

/// A slot and the list of pages that belongs to it.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
struct Page {
    slot: Slot,
    pages: [u64; 510],
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Pointing {
    request: u64,
    key: u64,
}

/// Three cache lines, as a request of a generic layer has.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Request {
    token: u64,
    rest: [u64; 23],
}

const _: () = assert!(size_of::<Slot>() == 16 && size_of::<Pointing>() == 16);
const _: () = assert!(size_of::<Page>() == 4096, "a page apart");
const _: () = assert!(size_of::<Request>() == 192, "three cache lines");

impl Ring {
    /// As many completions as slots, each slot once, in an order drawn from `seed`.
    pub fn new(count: u32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut identifiers: Vec<u32> = (0..count).collect();
        for left in (1..identifiers.len()).rev() {
            let other = usize::try_from(random.below(left as u64 + 1)).unwrap_or(0);
            identifiers.swap(left, other);
        }
        Self { identifiers }
    }
}

impl Ahead {
    /// Completes all of the ring, `laps` times. Returns the sum of the tokens, so that none is left
    /// out.
    #[inline(never)]
    pub fn drain<T: Table>(self, table: &mut T, ring: &Ring, laps: u32) -> u64 {
        let identifiers = ring.identifiers.as_slice();
        let mut sum = 0_u64;
        for _ in 0..laps {
            for (index, identifier) in identifiers.iter().enumerate() {
                if self.0 > 0
                    && let Some(later) = identifiers.get(index + self.0)
                {
                    table.prefetch(*later);
                }
                sum = sum.wrapping_add(table.complete(*identifier));
            }
        }
        sum
    }
}

impl Table for Dense {
    fn new(count: u32) -> Self {
        Self((0..u64::from(count)).map(|token| Slot { token, key: 0 }).collect())
    }

    #[inline]
    fn complete(&mut self, identifier: u32) -> u64 {
        self.0[identifier as usize].complete()
    }

    #[inline]
    fn prefetch(&self, identifier: u32) {
        dma::prefetch(&self.0[identifier as usize]);
    }
}

impl Table for Apart {
    fn new(count: u32) -> Self {
        let page = |token| Page { slot: Slot { token, key: 0 }, pages: [0; 510] };
        Self((0..u64::from(count)).map(page).collect())
    }

    #[inline]
    fn complete(&mut self, identifier: u32) -> u64 {
        self.0[identifier as usize].slot.complete()
    }

    #[inline]
    fn prefetch(&self, identifier: u32) {
        dma::prefetch(&self.0[identifier as usize].slot);
    }
}

impl Table for Behind {
    fn new(count: u32) -> Self {
        // Requests are given out in an order of their own.
        let order = Ring::new(count, 2).identifiers;
        let slots = order.iter().map(|at| Pointing { request: u64::from(*at), key: 0 }).collect();
        let request = |token| Request { token, rest: [0; 23] };
        Self { slots, requests: (0..u64::from(count)).map(request).collect() }
    }

    #[inline]
    fn complete(&mut self, identifier: u32) -> u64 {
        let slot = &mut self.slots[identifier as usize];
        slot.key = slot.key.wrapping_add(1);
        let request = usize::try_from(slot.request).unwrap_or(0);
        self.requests[request].token
    }

    #[inline]
    fn prefetch(&self, identifier: u32) {
        dma::prefetch(&self.slots[identifier as usize]);
    }
}

impl Slot {
    #[inline]
    fn complete(&mut self) -> u64 {
        self.key = self.key.wrapping_add(1);
        self.token
    }
}

#[cfg(test)]
mod tests {
    use super::{Ahead, Apart, Behind, Dense, Ring, Table};

    #[test]
    fn a_ring_names_every_slot_once_and_not_in_order() {
        let mut identifiers = Ring::new(2688, 1).identifiers;
        let in_place = identifiers.iter().zip(0..).filter(|(found, at)| **found == *at).count();
        assert!(in_place < 30, "{in_place} of 2688 are where they were");
        identifiers.sort_unstable();
        assert_eq!(identifiers, (0..2688).collect::<Vec<u32>>());
    }

    fn sum<T: Table>(ahead: usize) -> u64 {
        Ahead(ahead).drain(&mut T::new(100), &Ring::new(100, 1), 3)
    }

    #[test]
    fn every_layout_hands_out_every_token_however_far_ahead_it_asks() {
        for ahead in [0, 1, 2, 4, 1000] {
            let sums = [sum::<Dense>(ahead), sum::<Apart>(ahead), sum::<Behind>(ahead)];
            assert_eq!(sums, [3 * (99 * 100 / 2); 3], "{ahead} ahead");
        }
    }
}
