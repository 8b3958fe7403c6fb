//! Byte layouts of the specifications.

use tenmil_base::{RegionId, Segment};

use super::{GUEST, MEMORY_BYTES, USER, two_region_memory};
use crate::virtio_blk::{BlkConfig, BlkRequestHeader, BlkRequestType, DiscardSegment};
use crate::{GuestMemory, GuestRegion, InvalidAddress};

#[test]
fn blk_config_space_has_the_layout_of_the_specification() {
    let config = BlkConfig {
        sectors: 0x0102_0304_0506_0708,
        segment_bytes_max: 0x11_2233,
        segments_max: 126,
        block_bytes: 4096,
        physical_exponent: 3,
        queues: 0x0405,
        discard_sectors_max: 0x2000,
        zero_sectors_max: 0x1000,
    };
    let expected = [
        8, 7, 6, 5, 4, 3, 2, 1, // capacity
        0x33, 0x22, 0x11, 0, 126, 0, 0, 0, // size_max, seg_max
        0, 0, 0, 0, // geometry
        0, 0x10, 0, 0, // blk_size
        3, 0, 0, 0, 0, 0, 0, 0, // topology
        0, 0, 5, 4, // writeback, num_queues
        0, 0x20, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, // discard
        0, 0x10, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, // write zeroes
    ];
    assert_eq!(config.to_bytes(), expected);
    let none = BlkConfig { discard_sectors_max: 0, zero_sectors_max: 0, ..config }.to_bytes();
    assert_eq!((none[40], none[52], none[56]), (0, 0, 0));
}

#[test]
fn blk_request_header_has_type_and_sector() {
    for (number, kind) in [
        (0, BlkRequestType::Read),
        (1, BlkRequestType::Write),
        (4, BlkRequestType::Flush),
        (8, BlkRequestType::GetId),
        (11, BlkRequestType::Discard),
        (13, BlkRequestType::WriteZeroes),
        (2, BlkRequestType::Other(2)),
        (14, BlkRequestType::Other(14)),
    ] {
        let bytes = [number, 0, 0, 0, 9, 9, 9, 9, 8, 7, 0, 0, 0, 0, 0, 1];
        let sector = 0x0100_0000_0000_0708;
        assert_eq!(BlkRequestHeader::parse(bytes), BlkRequestHeader { kind, sector });
    }
    let stretch = DiscardSegment::parse([1, 2, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(stretch, DiscardSegment { sector: 0x201, sectors: 3, flags: DiscardSegment::UNMAP });
}

#[test]
fn guest_address_is_resolved_within_and_across_regions() {
    let space = two_region_memory();
    let half = MEMORY_BYTES / 2;
    let resolve = |address, len_bytes| {
        let mut pieces = Vec::new();
        space.resolve_guest_address(address, len_bytes, 8, &mut pieces).map(|()| pieces)
    };
    let piece = |offset, len_bytes| Segment { region: RegionId(3), offset, len_bytes };
    assert_eq!(resolve(GUEST, 16), Ok(vec![piece(0, 16)]));
    assert_eq!(resolve(GUEST + half - 4, 12), Ok(vec![piece(half - 4, 4), piece(half, 8)]));
    assert_eq!(resolve(GUEST, 0), Ok(Vec::new()));
    for (address, len_bytes) in [
        (GUEST - 1, 1),
        (GUEST + MEMORY_BYTES - 1, 2),
        (GUEST + MEMORY_BYTES, 1),
        (u64::MAX, u32::MAX),
        (0, u32::MAX),
    ] {
        let outside = InvalidAddress { address, len_bytes: len_bytes.into() };
        assert_eq!(resolve(address, len_bytes), Err(outside));
    }
    let mut few = Vec::new();
    assert!(
        space.resolve_guest_address(GUEST + half - 4, 12, 1, &mut few).is_err(),
        "no more than may be"
    );
    assert_eq!(space.resolve_user_address(USER + 8, 8), Ok(piece(8, 8)));
    // Contiguous for the guest, but not for the front end.
    assert!(space.resolve_user_address(USER + half - 4, 8).is_err());
    assert!(space.resolve_user_address(USER - 1, 1).is_err());
}

#[test]
fn overlapping_guest_regions_are_rejected() {
    let area = |guest, user, len_bytes| GuestRegion {
        guest,
        user,
        len_bytes,
        region: RegionId(0),
        offset: 0,
    };
    assert!(GuestMemory::new(vec![area(0, 0x9000, 0x1000), area(0x1000, 0, 0x1000)]).is_some());
    for other in [
        area(0xfff, 0, 0x1000),
        area(0x1000, 0x9fff, 0x1000),
        area(0, 0, 1),
        area(u64::MAX, 0, 2),
        area(0x1000, u64::MAX, 2),
        area(0x1000, 0, 0),
    ] {
        assert!(GuestMemory::new(vec![area(0, 0x9000, 0x1000), other]).is_none(), "{other:?}");
    }
}
