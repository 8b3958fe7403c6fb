//! PRPs: entries required by a transfer, and their alignment rules (Base 2.1 §4.3.1).
//!
//! ```text
//!  PRP1   first page, any dword offset
//!  PRP2   unused | second page, offset 0 | list, qword offset
//!  list   one entry per page, offset 0; the last entry of a full list page points to the next one
//! ```
//!
//! Walking the lists requires memory access and is done elsewhere; this file contains the
//! arithmetic.

use crate::status::Status;

/// Length of an entry (Base 2.1 §4.3.1).
pub const ENTRY_BYTES: usize = 8;

/// Meaning of PRP2 for a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prp2Use {
    /// Unused: the transfer is within one page.
    Unused,
    /// Address of the second page.
    Page,
    /// Address of a list of this many entries, for all pages but the first.
    List {
        /// Number of entries.
        entries: usize,
    },
}

/// Meaning of PRP2 for `len_bytes` that begin `offset` bytes into a page.
///
/// `page_bytes` is the memory page of CC.MPS.
#[inline]
#[must_use]
pub const fn prp2_use(offset: usize, len_bytes: usize, page_bytes: usize) -> Prp2Use {
    match page_count(offset, len_bytes, page_bytes) {
        0 | 1 => Prp2Use::Unused,
        2 => Prp2Use::Page,
        pages => Prp2Use::List { entries: pages - 1 },
    }
}

/// Number of pages touched by `len_bytes` that begin `offset` bytes into a page.
///
/// The sum of both must fit a `usize`.
#[inline]
#[must_use]
pub const fn page_count(offset: usize, len_bytes: usize, page_bytes: usize) -> usize {
    if len_bytes == 0 { 0 } else { (offset % page_bytes + len_bytes).div_ceil(page_bytes) }
}

/// Number of entries that fit into a list page from byte `offset` on.
#[inline]
#[must_use]
pub const fn list_entry_capacity(offset: usize, page_bytes: usize) -> usize {
    (page_bytes - offset % page_bytes) / ENTRY_BYTES
}

/// Number of pages of a list of `entries` that begins at the start of a page.
///
/// The last entry of every page but the last one points to the next page.
#[inline]
#[must_use]
pub const fn list_page_count(entries: usize, page_bytes: usize) -> usize {
    let capacity = list_entry_capacity(0, page_bytes);
    if entries <= capacity { 1 } else { (entries - 1).div_ceil(capacity - 1) }
}

/// Whether entry `index` of a list page is the pointer to the next list page, when `left` entries
/// remain, including this one.
#[inline]
#[must_use]
pub const fn is_list_link(index: usize, capacity: usize, left: usize) -> bool {
    index + 1 == capacity && left > 1
}

/// Rejects a first entry that is not a multiple of a dword (Base 2.1 §4.3.1).
pub const fn check_first_entry(prp: u64) -> Result<(), Status> {
    if prp & 3 == 0 { Ok(()) } else { Err(Status::PRP_OFFSET_INVALID) }
}

/// Rejects a further entry that is not page-aligned (Base 2.1 §4.3.1).
pub const fn check_page_entry(prp: u64, page_bytes: u64) -> Result<(), Status> {
    if prp & (page_bytes - 1) == 0 { Ok(()) } else { Err(Status::PRP_OFFSET_INVALID) }
}

/// Rejects a list pointer that is not a multiple of a qword (Base 2.1 §4.3.1).
pub const fn check_list_pointer(prp: u64) -> Result<(), Status> {
    if prp & 7 == 0 { Ok(()) } else { Err(Status::PRP_OFFSET_INVALID) }
}

#[cfg(test)]
mod tests {
    use super::{
        Prp2Use, check_first_entry, check_list_pointer, check_page_entry, is_list_link,
        list_entry_capacity, list_page_count, page_count, prp2_use,
    };
    use crate::status::Status;

    const PAGE: usize = 4096;

    #[test]
    fn prp_list_is_needed_from_the_third_page_on() {
        assert_eq!(prp2_use(0, PAGE, PAGE), Prp2Use::Unused);
        assert_eq!(prp2_use(4, PAGE, PAGE), Prp2Use::Page);
        assert_eq!(prp2_use(0, 2 * PAGE, PAGE), Prp2Use::Page);
        assert_eq!(prp2_use(4, 2 * PAGE, PAGE), Prp2Use::List { entries: 2 });
        assert_eq!(prp2_use(0, 2 * PAGE + 1, PAGE), Prp2Use::List { entries: 2 });
        assert_eq!(prp2_use(0, 0, PAGE), Prp2Use::Unused);
    }

    #[test]
    fn page_count_equals_a_byte_by_byte_count() {
        for offset in [0, 4, 60, 64] {
            for length in 0..300 {
                let mut touched: Vec<_> = (offset..offset + length).map(|at| at / 64).collect();
                touched.dedup();
                let begun = if offset == 64 { 0 } else { offset };
                assert_eq!(page_count(begun, length, 64), touched.len(), "{offset} {length}");
            }
        }
    }

    #[test]
    fn list_page_count_equals_a_walk_of_the_list() {
        let page = 64;
        let capacity = list_entry_capacity(0, page);
        for entries in 1..200 {
            let (mut walked, mut index, mut left) = (1, 0, entries);
            while left > 0 {
                if is_list_link(index, capacity, left) {
                    (walked, index) = (walked + 1, 0);
                } else {
                    (index, left) = (index + 1, left - 1);
                }
            }
            assert_eq!(list_page_count(entries, page), walked, "{entries} entries");
        }
    }

    #[test]
    fn misaligned_prp_entries_are_rejected() {
        let refused = Err(Status::PRP_OFFSET_INVALID);
        assert_eq!((check_first_entry(0x1004), check_first_entry(0x1002)), (Ok(()), refused));
        assert_eq!(
            (check_page_entry(0x2000, 4096), check_page_entry(0x2004, 4096)),
            (Ok(()), refused)
        );
        assert_eq!((check_list_pointer(0x2ff8), check_list_pointer(0x2ffc)), (Ok(()), refused));
        assert_eq!((list_entry_capacity(0, PAGE), list_entry_capacity(0xff8, PAGE)), (512, 1));
    }
}
