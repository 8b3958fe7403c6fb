//! Completion processing without anything else: find the slot of a completion and return its token.
//! The number in flight is that of 21 devices at depth 128, and completions arrive in another order
//! than that of the slots.
//!
//! ```text
//!   Dense        | token | key |        16 bytes apart, four to a cache line
//!   PageSpaced   | token | key | …      4 KiB apart: each followed by its list of pages
//!   Indirect     | where | key | ──▶ | token | …   the token is in a request behind a pointer
//! ```

use tenmil_base::Random;

/// Completions in the order of arrival, as slot indices.
#[derive(Debug)]
pub struct CompletionOrder {
    identifiers: Vec<u32>,
}

/// Slot table in some layout.
pub trait SlotLayout {
    /// Creates a table of `count` slots.
    fn new(count: u32) -> Self;

    /// Returns the token of a slot and advances its key.
    fn complete_slot(&mut self, identifier: u32) -> u64;

    /// Prefetches a slot.
    fn prefetch_slot(&self, identifier: u32);
}

/// Slots of sixteen bytes, with the token beside the key.
#[derive(Debug)]
pub struct DenseSlots(Vec<SixteenByteSlot>);

/// The same slots, a page apart.
#[derive(Debug)]
pub struct PageSpacedSlots(Vec<SlotPage>);

/// Adjacent slots that point to requests with the tokens.
#[derive(Debug)]
pub struct IndirectSlots {
    slots: Vec<SlotPointer>,
    requests: Vec<BlockLayerRequest>,
}

/// Loop over completions that prefetches slots this many completions ahead.
#[derive(Clone, Copy, Debug)]
pub struct PrefetchLoop(pub usize);

#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct SixteenByteSlot {
    token: u64,
    key: u64,
}

/// A slot with its list of pages.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
struct SlotPage {
    slot: SixteenByteSlot,
    pages: [u64; 510],
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct SlotPointer {
    request: u64,
    key: u64,
}

/// Three cache lines, like a request of a generic block layer.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct BlockLayerRequest {
    token: u64,
    rest: [u64; 23],
}

const _: () = assert!(size_of::<SixteenByteSlot>() == 16 && size_of::<SlotPointer>() == 16);
const _: () = assert!(size_of::<SlotPage>() == 4096, "a page apart");
const _: () = assert!(size_of::<BlockLayerRequest>() == 192, "three cache lines");

impl CompletionOrder {
    /// Creates as many completions as slots, each slot once, in an order drawn from `seed`.
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

impl PrefetchLoop {
    /// Processes the whole ring `laps` times. Returns the sum of the tokens, so that no read is
    /// optimized away.
    #[inline(never)]
    pub fn process_completions<T: SlotLayout>(
        self,
        table: &mut T,
        ring: &CompletionOrder,
        laps: u32,
    ) -> u64 {
        let identifiers = ring.identifiers.as_slice();
        let mut sum = 0_u64;
        for _ in 0..laps {
            for (index, identifier) in identifiers.iter().enumerate() {
                if self.0 > 0
                    && let Some(later) = identifiers.get(index + self.0)
                {
                    table.prefetch_slot(*later);
                }
                sum = sum.wrapping_add(table.complete_slot(*identifier));
            }
        }
        sum
    }
}

impl SlotLayout for DenseSlots {
    fn new(count: u32) -> Self {
        Self((0..u64::from(count)).map(|token| SixteenByteSlot { token, key: 0 }).collect())
    }

    #[inline]
    fn complete_slot(&mut self, identifier: u32) -> u64 {
        self.0[identifier as usize].complete()
    }

    #[inline]
    fn prefetch_slot(&self, identifier: u32) {
        tenmil_dma::prefetch_value(&self.0[identifier as usize]);
    }
}

impl SlotLayout for PageSpacedSlots {
    fn new(count: u32) -> Self {
        let page = |token| SlotPage { slot: SixteenByteSlot { token, key: 0 }, pages: [0; 510] };
        Self((0..u64::from(count)).map(page).collect())
    }

    #[inline]
    fn complete_slot(&mut self, identifier: u32) -> u64 {
        self.0[identifier as usize].slot.complete()
    }

    #[inline]
    fn prefetch_slot(&self, identifier: u32) {
        tenmil_dma::prefetch_value(&self.0[identifier as usize].slot);
    }
}

impl SlotLayout for IndirectSlots {
    fn new(count: u32) -> Self {
        // Requests are allocated in an order of their own.
        let order = CompletionOrder::new(count, 2).identifiers;
        let slots =
            order.iter().map(|at| SlotPointer { request: u64::from(*at), key: 0 }).collect();
        let request = |token| BlockLayerRequest { token, rest: [0; 23] };
        Self { slots, requests: (0..u64::from(count)).map(request).collect() }
    }

    #[inline]
    fn complete_slot(&mut self, identifier: u32) -> u64 {
        let slot = &mut self.slots[identifier as usize];
        slot.key = slot.key.wrapping_add(1);
        let request = usize::try_from(slot.request).unwrap_or(0);
        self.requests[request].token
    }

    #[inline]
    fn prefetch_slot(&self, identifier: u32) {
        tenmil_dma::prefetch_value(&self.slots[identifier as usize]);
    }
}

impl SixteenByteSlot {
    #[inline]
    fn complete(&mut self) -> u64 {
        self.key = self.key.wrapping_add(1);
        self.token
    }
}

#[cfg(test)]
mod tests {
    use super::{
        CompletionOrder, DenseSlots, IndirectSlots, PageSpacedSlots, PrefetchLoop, SlotLayout,
    };

    #[test]
    fn completion_order_names_every_slot_once_and_is_shuffled() {
        let mut identifiers = CompletionOrder::new(2688, 1).identifiers;
        let in_place = identifiers.iter().zip(0..).filter(|(found, at)| **found == *at).count();
        assert!(in_place < 30, "{in_place} of 2688 are where they were");
        identifiers.sort_unstable();
        assert_eq!(identifiers, (0..2688).collect::<Vec<u32>>());
    }

    fn token_sum<T: SlotLayout>(ahead: usize) -> u64 {
        PrefetchLoop(ahead).process_completions(&mut T::new(100), &CompletionOrder::new(100, 1), 3)
    }

    #[test]
    fn every_layout_returns_every_token_at_any_prefetch_distance() {
        for ahead in [0, 1, 2, 4, 1000] {
            let sums = [
                token_sum::<DenseSlots>(ahead),
                token_sum::<PageSpacedSlots>(ahead),
                token_sum::<IndirectSlots>(ahead),
            ];
            assert_eq!(sums, [3 * (99 * 100 / 2); 3], "{ahead} ahead");
        }
    }
}
