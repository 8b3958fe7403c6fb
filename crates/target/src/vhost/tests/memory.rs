//! The table of a front end's memory, stretch by stretch.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dma::Regions;
use vhost::{MemoryArea, MemoryChange};

use super::super::memory::{SLOTS_MAX, Table};

/// A stretch, and a file as long as it is.
fn stretch(index: u64, len_bytes: u64) -> (MemoryArea, Arc<OwnedFd>) {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(len_bytes).unwrap();
    let (guest, user) = (index << 12, 1 << 45 | index << 12);
    (MemoryArea { guest, len_bytes, user, file_offset: 0 }, Arc::new(file.into()))
}

fn added(table: &Table, index: u64, len_bytes: u64, regions: &Regions) -> Result<Table, String> {
    let (area, file) = stretch(index, len_bytes);
    table.changed(MemoryChange::Add(area, file), regions)
}

#[test]
fn there_are_as_many_stretches_as_was_said_and_each_is_taken_away_by_all_that_it_is() {
    let regions = Regions::new(1024);
    let mut table = Table::default();
    for index in 0..SLOTS_MAX.into() {
        table = added(&table, index, 4096, &regions).unwrap();
    }
    let refused = added(&table, 256, 4096, &regions).unwrap_err();
    assert_eq!(refused, "256 stretches are shared, expected fewer");
    let (area, _) = stretch(7, 4096);
    for wrong in [MemoryArea { len_bytes: 8192, ..area }, MemoryArea { user: 0, ..area }] {
        let refused = table.changed(MemoryChange::Remove(wrong), &regions).unwrap_err();
        assert_eq!(refused, "memory at 0x7000 is not shared, expected some that is");
    }
    table = table.changed(MemoryChange::Remove(area), &regions).unwrap();
    assert!(added(&table, 256, 4096, &regions).is_ok());
}

/// Each is allowed, and both together are not.
#[test]
fn what_is_added_counts_with_what_is_there() {
    let regions = Regions::new(8);
    let most = 3 << 40;
    let table = added(&Table::default(), 0, most, &regions).unwrap();
    let refused = added(&table, most >> 12, most, &regions).unwrap_err();
    assert!(refused.contains("6597069766656 bytes are shared, expected"), "{refused}");
}
