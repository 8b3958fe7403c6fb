//! Table of a front end's memory areas.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use tenmil_base::Error;

use tenmil_dma::RegionTable;
use tenmil_vhost_user::{MemoryChange, MemoryRegionDesc};

use super::super::guest_memory_table::{GuestMemoryTable, SLOTS_MAX};

/// Memory area, with a file of the same size.
fn memory_region(index: u64, len_bytes: u64) -> (MemoryRegionDesc, Arc<OwnedFd>) {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(len_bytes).unwrap();
    let (guest, user) = (index << 12, 1 << 45 | index << 12);
    (MemoryRegionDesc { guest, len_bytes, user, file_offset: 0 }, Arc::new(file.into()))
}

fn with_region(
    table: &GuestMemoryTable,
    index: u64,
    len_bytes: u64,
    regions: &RegionTable,
) -> Result<GuestMemoryTable, Error> {
    let (area, file) = memory_region(index, len_bytes);
    table.with_changes(MemoryChange::Add(area, file), regions)
}

#[test]
fn memory_table_has_the_stated_regions_and_removal_must_match_exactly() {
    let regions = RegionTable::new(1024);
    let mut table = GuestMemoryTable::default();
    for index in 0..SLOTS_MAX.into() {
        table = with_region(&table, index, 4096, &regions).unwrap();
    }
    let refused = with_region(&table, 256, 4096, &regions).unwrap_err();
    assert_eq!(refused, Error::environment("256 stretches are shared, expected fewer"));
    let (area, _) = memory_region(7, 4096);
    for wrong in
        [MemoryRegionDesc { len_bytes: 8192, ..area }, MemoryRegionDesc { user: 0, ..area }]
    {
        let refused = table.with_changes(MemoryChange::Remove(wrong), &regions).unwrap_err();
        assert_eq!(
            refused,
            Error::environment("memory at 0x7000 is not shared, expected some that is")
        );
    }
    table = table.with_changes(MemoryChange::Remove(area), &regions).unwrap();
    assert!(with_region(&table, 256, 4096, &regions).is_ok());
}

/// Each area is permitted, but both together exceed the limit.
#[test]
fn added_region_counts_towards_the_total() {
    let regions = RegionTable::new(8);
    let most = 3 << 40;
    let table = with_region(&GuestMemoryTable::default(), 0, most, &regions).unwrap();
    let refused = with_region(&table, most >> 12, most, &regions).unwrap_err();
    assert!(refused.text.contains("6597069766656 bytes are shared, expected"), "{refused}");
}
