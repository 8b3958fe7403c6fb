//! I/O virtual address allocator for a device behind an IOMMU with a limited address range.

use std::collections::BTreeMap;

/// Free I/O virtual addresses. An IOMMU may have 39 or 48 address bits, with holes.
#[derive(Clone, Debug)]
pub struct IovaAllocator {
    /// Free ranges: start and length. Adjacent ranges are merged.
    free: BTreeMap<u64, u64>,
}

/// Maximum alignment of an allocation. Allocations are aligned to their size up to this, so that an IOMMU
/// can use its largest pages.
const ALIGNMENT_MAX: u64 = 1 << 30;
const PAGE: u64 = 4096;

impl IovaAllocator {
    /// Creates an address space of these ranges, each with its last address. The first page is excluded,
    /// so that zero is never a valid address.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut space = Self { free: BTreeMap::new() };
        for (first, last) in ranges {
            let first = first.max(PAGE).next_multiple_of(PAGE);
            // The very last page is excluded: its end does not fit in 64 bits.
            let end = last.saturating_add(1) & !(PAGE - 1);
            if first < end {
                space.free_range(first, end - first);
            }
        }
        space
    }

    /// Allocates a contiguous range of whole pages, if there is one.
    pub fn allocate_range(&mut self, len_bytes: u64) -> Option<u64> {
        let len_bytes = len_bytes.max(1).checked_next_multiple_of(PAGE)?;
        let alignment = len_bytes.checked_next_power_of_two()?.min(ALIGNMENT_MAX);
        let fitting = self.free.iter().find_map(|(start, room)| {
            let iova = start.checked_next_multiple_of(alignment)?;
            let skip = iova - start;
            (skip.checked_add(len_bytes)? <= *room).then_some((*start, *room, iova))
        });
        let (start, room, iova) = fitting?;
        self.free.remove(&start);
        let (before, after) = (iova - start, start + room - (iova + len_bytes));
        if before > 0 {
            self.free.insert(start, before);
        }
        if after > 0 {
            self.free.insert(iova + len_bytes, after);
        }
        Some(iova)
    }

    /// Excludes the free addresses of this range: another device or the interrupt range uses them.
    pub fn exclude_range(&mut self, iova: u64, len_bytes: u64) {
        let first = iova & !(PAGE - 1);
        let end = iova.saturating_add(len_bytes).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        let touched: Vec<(u64, u64)> = self
            .free
            .range(..end)
            .map(|(start, room)| (*start, *room))
            .filter(|(start, room)| start + room > first)
            .collect();
        for (start, room) in touched {
            self.free.remove(&start);
            if start < first {
                self.free.insert(start, first - start);
            }
            if start + room > end {
                self.free.insert(end, start + room - end);
            }
        }
    }

    /// Frees an allocated range.
    pub fn free_range(&mut self, iova: u64, len_bytes: u64) {
        let (mut start, mut len) = (iova, len_bytes.max(1).next_multiple_of(PAGE));
        if let Some((before, room)) = self.free.range(..iova).next_back()
            && before + room == iova
        {
            (start, len) = (*before, room + len);
        }
        if let Some(room) = self.free.remove(&(start + len)) {
            len += room;
        }
        self.free.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::IovaAllocator;

    #[test]
    fn allocated_ranges_are_inside_disjoint_and_reusable() {
        let ranges = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
        let mut space = IovaAllocator::new(ranges);
        let whole = space.clone();
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut random = 9_u64;
        for round in 0..2000 {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            if round % 3 == 2 {
                let at = (random >> 33) as usize % taken.len();
                let (iova, len) = taken.swap_remove(at);
                space.free_range(iova, len);
                continue;
            }
            let len = 4096 << (random >> 60);
            let iova = space.allocate_range(len).unwrap();
            assert!(iova > 0 && iova.is_multiple_of(len.min(1 << 30)), "{iova:#x}");
            let is_inside =
                ranges.iter().any(|(first, last)| *first <= iova && iova + len - 1 <= *last);
            assert!(is_inside, "{iova:#x} {len:#x}");
            let apart =
                |(other, other_len): &(u64, u64)| iova + len <= *other || other + other_len <= iova;
            assert!(taken.iter().all(apart), "{iova:#x}");
            taken.push((iova, len));
        }
        taken.into_iter().for_each(|(iova, len)| space.free_range(iova, len));
        assert_eq!(space.free, whole.free);
    }

    #[test]
    fn excluded_range_is_never_allocated() {
        type Ranges<'a> = &'a [(u64, u64)];
        let (low, high) = ((0x1000, 0x4fff), (0x8000, 0xbfff));
        let cases: [(u64, u64, Ranges<'_>); 7] = [
            (0x2000, 0x1000, &[(0x1000, 0x1000), (0x3000, 0x2000), (0x8000, 0x4000)]),
            (0x1000, 0x4000, &[(0x8000, 0x4000)]),
            (0x4fff, 0x3002, &[(0x1000, 0x3000), (0x9000, 0x3000)]),
            (0, u64::MAX, &[]),
            (0x5000, 0x3000, &[(0x1000, 0x4000), (0x8000, 0x4000)]),
            (0xc000, u64::MAX, &[(0x1000, 0x4000), (0x8000, 0x4000)]),
            (0x8000, 1, &[(0x1000, 0x4000), (0x9000, 0x3000)]),
        ];
        for (iova, len, expected) in cases {
            let mut space = IovaAllocator::new([low, high]);
            space.exclude_range(iova, len);
            let left: Vec<(u64, u64)> = space.free.iter().map(|(at, len)| (*at, *len)).collect();
            assert_eq!(left, expected, "{iova:#x} {len:#x}");
        }
    }

    #[test]
    fn thirty_nine_address_bits_suffice_for_many_ssds_and_a_large_guest() {
        let mut space = IovaAllocator::new([(0, (1 << 39) - 1)]);
        for _ in 0..64 {
            assert!(space.allocate_range(20 << 20).unwrap() < 1 << 39);
        }
        let guest = space.allocate_range(256 << 30).unwrap();
        assert!(guest + (256 << 30) <= 1 << 39);
        assert_eq!(space.allocate_range(256 << 30), None, "there are no more");
        space.free_range(guest, 256 << 30);
        assert!(space.allocate_range(300 << 30).is_some());
        let mut none = IovaAllocator::new([(5, 4)]);
        assert_eq!(none.allocate_range(1), None);
        assert!(IovaAllocator::new([(0, u64::MAX)]).allocate_range(u64::MAX).is_none());
    }
}
