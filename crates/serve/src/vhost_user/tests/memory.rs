//! Table of a front end's memory areas.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use tenmil_base::Error;

use tenmil_dma::RegionTable;
use tenmil_vhost_user::{MemoryChange, MemoryRegionDesc};

use super::super::memory::{SLOTS_MAX, Table};

/// Memory area, with a file of the same size.
fn stretch(index: u64, len_bytes: u64) -> (MemoryRegionDesc, Arc<OwnedFd>) {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(len_bytes).unwrap();
    let (guest, user) = (index << 12, 1 << 45 | index << 12);
    (MemoryRegionDesc { guest, len_bytes, user, file_offset: 0 }, Arc::new(file.into()))
}

fn added(table: &Table, index: u64, len_bytes: u64, regions: &RegionTable) -> Result<Table, Error> {
    let (area, file) = stretch(index, len_bytes);
    table.changed(MemoryChange::Add(area, file), regions)
}

#[test]
fn there_are_as_many_stretches_as_was_said_and_each_is_taken_away_by_all_that_it_is() {
    let regions = RegionTable::new(1024);
    let mut table = Table::default();
    for index in 0..SLOTS_MAX.into() {
        table = added(&table, index, 4096, &regions).unwrap();
    }
    let refused = added(&table, 256, 4096, &regions).unwrap_err();
    assert_eq!(refused, Error::environment("256 stretches are shared, expected fewer"));
    let (area, _) = stretch(7, 4096);
    for wrong in
        [MemoryRegionDesc { len_bytes: 8192, ..area }, MemoryRegionDesc { user: 0, ..area }]
    {
        let refused = table.changed(MemoryChange::Remove(wrong), &regions).unwrap_err();
        assert_eq!(
            refused,
            Error::environment("memory at 0x7000 is not shared, expected some that is")
        );
    }
    table = table.changed(MemoryChange::Remove(area), &regions).unwrap();
    assert!(added(&table, 256, 4096, &regions).is_ok());
}

/// Each area is permitted, but both together exceed the limit.
#[test]
fn what_is_added_counts_with_what_is_there() {
    let regions = RegionTable::new(8);
    let most = 3 << 40;
    let table = added(&Table::default(), 0, most, &regions).unwrap();
    let refused = added(&table, most >> 12, most, &regions).unwrap_err();
    assert!(refused.text.contains("6597069766656 bytes are shared, expected"), "{refused}");
}
