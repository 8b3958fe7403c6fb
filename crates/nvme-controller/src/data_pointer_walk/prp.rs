//! Physical Region Page entries (Base 2.1 §4.3.1).
//!
//! ```text
//!   PRP1 ─▶ any dword of a page, to the end of the page
//!   PRP2 ─▶ the second page, if two are enough
//!   PRP2 ─▶ a list: [ page | page | … | page or, if more follow, next list ]  up to a page's end
//! ```

use tenmil_wire::{Command, Status};

use super::{HostRanges, LIST_BYTES_MAX, WalkStep, qwords};

/// Position in a PRP list.
#[derive(Debug)]
pub(super) struct PrpCursor {
    /// Address of the next entry.
    iova: u64,
    page_bytes: u32,
}

const ENTRY_BYTES: u32 = 8;

impl PrpCursor {
    pub(super) const NONE: Self = Self { iova: 0, page_bytes: 0 };

    pub(super) fn start(
        command: &Command,
        left: &mut u32,
        page_shift: u8,
        ranges: &mut HostRanges,
    ) -> Result<(Self, WalkStep), Status> {
        let mut list = Self { iova: 0, page_bytes: 1 << page_shift };
        let (prp1, prp2) = (command.prp1(), command.prp2());
        // "The offset shall be dword aligned": the two low bits are zero.
        if prp1 & 3 != 0 {
            return Err(Status::PRP_OFFSET_INVALID.with_dnr());
        }
        let first = (list.page_bytes - list.page_offset(prp1)).min(*left);
        if first > 0 {
            ranges.push(prp1, first)?;
        }
        *left -= first;
        if *left == 0 {
            return Ok((list, WalkStep::Done));
        }
        if *left <= list.page_bytes {
            list.append_page(prp2, left, ranges)?;
            return Ok((list, WalkStep::Done));
        }
        // PRP2 points to a list; its entries are qwords.
        if prp2 & 7 != 0 {
            return Err(Status::PRP_OFFSET_INVALID.with_dnr());
        }
        list.iova = prp2;
        let next = list.next_walk_step(*left);
        Ok((list, next))
    }

    pub(super) fn supply_list(
        &mut self,
        list: &[u8],
        left: &mut u32,
        ranges: &mut HostRanges,
    ) -> Result<WalkStep, Status> {
        for entry in qwords(list) {
            let is_last_of_page = self.page_offset(self.iova) == self.page_bytes - ENTRY_BYTES;
            if is_last_of_page && *left > self.page_bytes {
                // A list continues at the start of a page.
                if self.page_offset(entry) != 0 {
                    return Err(Status::PRP_OFFSET_INVALID.with_dnr());
                }
                self.iova = entry;
                return Ok(self.next_walk_step(*left));
            }
            self.append_page(entry, left, ranges)?;
            if *left == 0 {
                return Ok(WalkStep::Done);
            }
            // At the end of the address space the next host read fails.
            self.iova = self.iova.wrapping_add(u64::from(ENTRY_BYTES));
        }
        Ok(self.next_walk_step(*left))
    }

    /// Appends a data page: every entry but the first has offset zero.
    fn append_page(
        &self,
        entry: u64,
        left: &mut u32,
        ranges: &mut HostRanges,
    ) -> Result<(), Status> {
        if self.page_offset(entry) != 0 {
            return Err(Status::PRP_OFFSET_INVALID.with_dnr());
        }
        let len_bytes = self.page_bytes.min(*left);
        *left -= len_bytes;
        ranges.push(entry, len_bytes)
    }

    fn next_walk_step(&self, left: u32) -> WalkStep {
        let to_page_end = self.page_bytes - self.page_offset(self.iova);
        let wanted = left.div_ceil(self.page_bytes).saturating_mul(ENTRY_BYTES);
        let len_max = u32::try_from(LIST_BYTES_MAX).unwrap_or(u32::MAX);
        WalkStep::List { iova: self.iova, len_bytes: to_page_end.min(wanted).min(len_max) }
    }

    fn page_offset(&self, iova: u64) -> u32 {
        let mask = u64::from(self.page_bytes) - 1;
        u32::try_from(iova & mask).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use crate::data_pointer_walk::tests::{host_range, walk_data_pointer};
    use crate::data_pointer_walk::{Direction, HostRange};
    use tenmil_wire::{Command, Status};

    const PAGE: u32 = 4096;
    const INVALID: Result<Vec<HostRange>, Status> = Err(Status::PRP_OFFSET_INVALID.with_dnr());

    fn walk_prps(prp1: u64, prp2: u64, len: u32, memory: &[u8]) -> Result<Vec<HostRange>, Status> {
        walk_data_pointer(&Command::new(2).with_prp(prp1, prp2), len, Direction::ToHost, memory)
    }

    fn store_prp_entries(memory: &mut [u8], at: usize, entries: &[u64]) {
        for (index, entry) in entries.iter().enumerate() {
            memory[at + index * 8..][..8].copy_from_slice(&entry.to_le_bytes());
        }
    }

    #[test]
    fn first_prp_extends_to_the_end_of_its_page() {
        assert_eq!(
            walk_prps(0x5004, 7, 4092, &[]),
            Ok(vec![host_range(0x5004, 4092)]),
            "PRP2 is not looked at"
        );
        assert_eq!(walk_prps(0x5000, 0, 0, &[]), Ok(vec![]));
        for misaligned in [1, 2, 3] {
            assert_eq!(walk_prps(0x5000 + misaligned, 0, 512, &[]), INVALID);
        }
    }

    #[test]
    fn second_prp_is_a_whole_page() {
        let expected = vec![host_range(0x5200, 0xe00), host_range(0x9000, 0x200)];
        assert_eq!(walk_prps(0x5200, 0x9000, PAGE, &[]), Ok(expected));
        assert_eq!(
            walk_prps(0x5000, 0x6000, 2 * PAGE, &[]),
            Ok(vec![host_range(0x5000, 2 * PAGE)])
        );
        assert_eq!(walk_prps(0x5200, 0x9008, PAGE, &[]), INVALID);
    }

    #[test]
    fn prp_list_may_begin_within_a_page_and_continue_in_another() {
        // The list begins two entries before the end of a page: one page of data, one link.
        let mut memory = vec![0; 0x3000];
        store_prp_entries(&mut memory, 0xff0, &[0x10_0000, 0x2000]);
        store_prp_entries(&mut memory, 0x2000, &[0x30_0000, 0x40_0000]);
        let expected = vec![
            host_range(0x5000, PAGE),
            host_range(0x10_0000, PAGE),
            host_range(0x30_0000, PAGE),
            host_range(0x40_0000, 100),
        ];
        assert_eq!(walk_prps(0x5000, 0xff0, 3 * PAGE + 100, &memory), Ok(expected));
    }

    #[test]
    fn last_prp_list_entry_is_data_if_the_transfer_ends_there() {
        let mut memory = vec![0; 0x1000];
        store_prp_entries(&mut memory, 0xff0, &[0x10_0000, 0x20_0000]);
        let expected = vec![
            host_range(0x5000, PAGE),
            host_range(0x10_0000, PAGE),
            host_range(0x20_0000, PAGE),
        ];
        assert_eq!(walk_prps(0x5000, 0xff0, 3 * PAGE, &memory), Ok(expected));
    }

    #[test]
    fn long_prp_list_is_read_in_parts_and_merged() {
        let entries: Vec<u64> = (0..256).map(|index| 0x10_0000 + index * 4096).collect();
        let mut memory = vec![0; 0x1000];
        store_prp_entries(&mut memory, 0x100, &entries);
        let expected = vec![host_range(0x5000, PAGE), host_range(0x10_0000, 256 * PAGE)];
        assert_eq!(walk_prps(0x5000, 0x100, 257 * PAGE, &memory), Ok(expected));
    }

    #[test]
    fn invalid_prp_list_offsets_are_rejected() {
        let mut memory = vec![0; 0x3000];
        assert_eq!(walk_prps(0x5000, 0x104, 3 * PAGE, &memory), INVALID, "a list of qwords");
        store_prp_entries(&mut memory, 0x100, &[0x10_0000, 0x20_0010]);
        assert_eq!(walk_prps(0x5000, 0x100, 3 * PAGE, &memory), INVALID, "an entry with an offset");
        store_prp_entries(&mut memory, 0xff8, &[0x2008]);
        assert_eq!(walk_prps(0x5000, 0xff8, 4 * PAGE, &memory), INVALID, "a link with an offset");
        let absent = Err(Status::DATA_TRANSFER_ERROR);
        assert_eq!(walk_prps(0x5000, 0x8000_0000, 3 * PAGE, &memory), absent, "a list nowhere");
        store_prp_entries(&mut memory, 0x100, &[u64::MAX - 4095, 0]);
        assert_eq!(walk_prps(0x5000, 0x100, 3 * PAGE, &memory), absent, "data past the end of all");
    }
}
