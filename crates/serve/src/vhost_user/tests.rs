//! Tests of a disk over a Unix socket, with front ends that speak the protocol by hand.

mod crash_recovery;
mod guest_memory_table;
mod malicious_front_end;
mod request_table;
mod resize;
mod test_front_end;
mod virtio_driver;
mod well_behaved_front_end;

use tenmil_base::{Durability, Limits, Operation, OperationSet};
use tenmil_vhost_user::features::device;
use tenmil_vhost_user::virtio_blk::{BlkRequestHeader, BlkRequestType, BlkStatus, DiscardSegment};

use super::device_id_of_uri;
use super::disk::{DiskRequest, VirtioDisk, virtio_status};

fn device_limits() -> Limits {
    Limits {
        block_size: 4096,
        metadata_size: 0,
        block_count: 1024,
        request_blocks_max: u32::MAX,
        segments_max: 512,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: 32,
        durability: Durability::VolatileCache,
        operations: OperationSet::from_operations(&[
            Operation::Read,
            Operation::Write,
            Operation::Flush,
            Operation::Deallocate,
            Operation::WriteZeroes,
        ]),
    }
}

fn test_disk(limits: Limits) -> VirtioDisk {
    VirtioDisk::new(limits, false, device_id_of_uri("x")).unwrap()
}

#[test]
fn features_match_the_device() {
    let all = test_disk(device_limits()).features();
    for feature in [device::FLUSH, device::DISCARD, device::WRITE_ZEROES, device::VERSION_1] {
        assert_ne!(all & feature, 0, "{feature:#x}");
    }
    assert_eq!(all & device::RO, 0);
    let stable = test_disk(Limits { durability: Durability::Persistent, ..device_limits() });
    assert_eq!(all & !stable.features(), device::FLUSH);
    assert_eq!(stable.validate_flush(), None);
    let few = OperationSet::from_operations(&[Operation::Read, Operation::Write, Operation::Flush]);
    let few = test_disk(Limits { operations: few, ..device_limits() });
    assert_eq!(all & !few.features(), device::DISCARD | device::WRITE_ZEROES);
    let config = few.config_space(3);
    assert_eq!((config.discard_sectors_max, config.zero_sectors_max), (0, 0));
    let read_only = VirtioDisk::new(device_limits(), true, device_id_of_uri("x")).unwrap();
    let missing = device::DISCARD | device::WRITE_ZEROES;
    assert_eq!(read_only.features(), all & !missing | device::RO);
    let config = test_disk(device_limits()).config_space(3);
    assert_eq!((config.sectors, config.block_bytes, config.queues), (8192, 4096, 3));
    assert_eq!(config.physical_exponent, 0);
    let small = test_disk(Limits { block_size: 512, ..device_limits() }).config_space(1);
    assert_eq!((small.sectors, small.physical_exponent), (1024, 3));
}

#[test]
fn device_unusable_as_disk_is_rejected_with_the_reason() {
    for (limits, expected) in [
        (Limits { metadata_size: 8, ..device_limits() }, "8 bytes of metadata, expected none"),
        (
            Limits { block_size: 128 << 10, ..device_limits() },
            "131072 bytes, expected a power of two",
        ),
        (Limits { block_size: 520, ..device_limits() }, "520 bytes, expected a power of two"),
        (Limits { block_count: 0, ..device_limits() }, "no blocks"),
        (Limits { segments_max: 8, ..device_limits() }, "8 segments at most, expected 126"),
    ] {
        let refused = VirtioDisk::new(limits, false, device_id_of_uri("x")).unwrap_err();
        assert!(refused.text.contains(expected), "{refused}");
    }
}

#[test]
fn transfer_is_validated_against_the_disk() {
    use tenmil_base::RequestFlags;
    let disk = test_disk(device_limits());
    let of = |kind, sector, len_bytes| {
        disk.validate_transfer(BlkRequestHeader { kind, sector }, len_bytes, 1, device::FLUSH)
    };
    let ask =
        |operation, lba, blocks| DiskRequest { operation, flags: RequestFlags::NONE, lba, blocks };
    assert_eq!(of(BlkRequestType::Read, 8, 8192), Ok(ask(Operation::Read, 1, 2)));
    assert_eq!(of(BlkRequestType::Write, 8184, 4096), Ok(ask(Operation::Write, 1023, 1)));
    for (sector, len_bytes) in [
        (0, 0),
        (0, 512),
        (0, 4095),
        (1, 4096),
        (8184, 8192),
        (8192, 4096),
        (u64::MAX, 4096),
        (u64::MAX - 7, 4096),
        (0, 64 << 20),
    ] {
        assert_eq!(
            of(BlkRequestType::Read, sector, len_bytes),
            Err(BlkStatus::ERROR),
            "{sector} {len_bytes}"
        );
    }
    let many = disk.validate_transfer(
        BlkRequestHeader { kind: BlkRequestType::Read, sector: 0 },
        4096,
        513,
        0,
    );
    assert_eq!(many, Err(BlkStatus::ERROR));
    // Without a negotiated flush, a completed write is durable.
    let forced = disk
        .validate_transfer(BlkRequestHeader { kind: BlkRequestType::Write, sector: 0 }, 4096, 1, 0)
        .unwrap();
    assert_eq!(forced.flags, RequestFlags::FUA);
    let read_only = VirtioDisk::new(device_limits(), true, device_id_of_uri("x")).unwrap();
    let write = BlkRequestHeader { kind: BlkRequestType::Write, sector: 0 };
    assert_eq!(read_only.validate_transfer(write, 4096, 1, 0), Err(BlkStatus::ERROR));
}

#[test]
fn discard_and_write_zeroes_are_validated_against_the_disk() {
    use tenmil_base::RequestFlags;
    let disk = test_disk(device_limits());
    let of = |kind, sector, sectors, flags| {
        disk.validate_discard(kind, DiscardSegment { sector, sectors, flags })
    };
    let ask = |operation, flags| Ok(DiskRequest { operation, flags, lba: 2, blocks: 3 });
    assert_eq!(
        of(BlkRequestType::Discard, 16, 24, 0),
        ask(Operation::Deallocate, RequestFlags::NONE)
    );
    assert_eq!(
        of(BlkRequestType::WriteZeroes, 16, 24, 0),
        ask(Operation::WriteZeroes, RequestFlags::NONE)
    );
    assert_eq!(
        of(BlkRequestType::WriteZeroes, 16, 24, 1),
        ask(Operation::WriteZeroes, RequestFlags::DEALLOCATE)
    );
    assert_eq!(of(BlkRequestType::Discard, 16, 24, 1), Err(BlkStatus::UNSUPPORTED));
    assert_eq!(of(BlkRequestType::WriteZeroes, 16, 24, 2), Err(BlkStatus::UNSUPPORTED));
    assert_eq!(of(BlkRequestType::Discard, 16, 25, 0), Err(BlkStatus::ERROR));
    assert_eq!(of(BlkRequestType::Discard, 16, 0, 0), Err(BlkStatus::ERROR));
    assert_eq!(of(BlkRequestType::Discard, 8184, 16, 0), Err(BlkStatus::ERROR));
    assert_eq!(of(BlkRequestType::Discard, 0, (64 << 11) + 8, 0), Err(BlkStatus::ERROR));
    let none = OperationSet::from_operations(&[Operation::Read, Operation::Write]);
    let none = test_disk(Limits { operations: none, ..device_limits() });
    let stretch = DiscardSegment { sector: 0, sectors: 8, flags: 0 };
    assert_eq!(
        none.validate_discard(BlkRequestType::Discard, stretch),
        Err(BlkStatus::UNSUPPORTED)
    );
}

#[test]
fn device_id_is_twenty_bytes_and_stable_for_a_uri() {
    assert_eq!(device_id_of_uri("file:/a"), device_id_of_uri("file:/a"));
    assert_ne!(device_id_of_uri("file:/a"), device_id_of_uri("file:/b"));
    assert!(
        device_id_of_uri("x").starts_with(b"tenmil")
            && device_id_of_uri("x").iter().all(u8::is_ascii_alphanumeric)
    );
    assert_eq!(virtio_status(tenmil_base::IoStatus::INVALID_OPCODE), BlkStatus::UNSUPPORTED);
    assert_eq!(virtio_status(tenmil_base::IoStatus::WRITE_FAULT), BlkStatus::ERROR);
}
