//! Effects of every command, for all kinds of hosts and block devices.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{Durability, Operation, OperationSet, RequestFlags};
use tenmil_wire::cache_instance::CacheInstance;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{DataPointer, IoOpcode, Status};

use super::fixture::{
    COPIED, DATA, FixtureConfig, LATER, QueueFixture, SHARED, fixture_ram, io_command,
};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::fake_host::HostBehavior;
use crate::namespace::RevocableCacheInstance;

const COMPARE_FAILURE: Status = Status::COMPARE_FAILURE;

/// Hosts with and without shared memory, block devices with all and with minimal capabilities, immediate
/// and delayed.
fn host_and_device_variants() -> Vec<(String, QueueFixture)> {
    let bare =
        OperationSet::from_operations(&[Operation::Read, Operation::Write, Operation::Flush]);
    let hosts: [(&str, HostBehavior); 3] =
        [("shared", SHARED), ("copied", COPIED), ("later", LATER)];
    let mut worlds = Vec::new();
    for (name, behavior) in hosts {
        for seed in 0..4 {
            let ram = fixture_ram();
            let device = FakeDevice::new(&ram, super::fixture::BLOCKS);
            let device = if seed % 2 == 0 { device } else { device.with_random_delays(seed) };
            let device = if seed < 2 {
                device
            } else {
                device.with_limits(|limits| {
                    limits.operations = bare;
                    limits.request_blocks_max = 5;
                    limits.segments_max = 3;
                })
            };
            // One buffer of three blocks has to suffice.
            let setup = FixtureConfig {
                behavior,
                seed: seed + 10,
                buffers: 1,
                buffer_bytes: 1536,
                ..FixtureConfig::default()
            };
            worlds.push((format!("{name} {seed}"), QueueFixture::new(&setup, &ram, device)));
        }
    }
    worlds
}

#[test]
fn written_data_is_read_and_compared_in_every_variant() {
    for (name, mut rig) in host_and_device_variants() {
        for (blocks, offset) in [(1, 0), (8, 0), (8, 0x204), (16, 0x10)] {
            let len = blocks as usize * 512;
            // A list for the pages after the first, although two need none.
            let pages: Vec<u8> =
                (1..9_u64).flat_map(|page| (DATA + page * 0x1000).to_le_bytes()).collect();
            rig.write_host_memory(0x6000, &pages);
            let first_page = 0x1000 - offset;
            let second = if len as u64 - first_page.min(len as u64) > 0x1000 {
                0x6000
            } else {
                DATA + 0x1000
            };
            let at = DATA + offset;
            let bytes = rig.fill_with_random_bytes(at, len, 7 + u64::from(blocks));
            rig.run_successfully(io_command(IoOpcode::Write, 20, blocks).with_prp(at, second));
            assert_eq!(rig.device.contents().bytes[20 * 512..][..len], bytes, "{name}");
            rig.run_successfully(io_command(IoOpcode::Compare, 20, blocks).with_prp(at, second));
            rig.write_host_memory(at, &vec![0; len]);
            let compared =
                rig.run_command(io_command(IoOpcode::Compare, 20, blocks).with_prp(at, second));
            assert!(
                compared.status().has_same_code_as(COMPARE_FAILURE),
                "{name}: {:?}",
                compared.status()
            );
            rig.run_successfully(io_command(IoOpcode::Read, 20, blocks).with_prp(at, second));
            assert_eq!(rig.read_host_memory(at, len), bytes, "{name}, {blocks} blocks at {offset}");
        }
        assert_eq!(rig.shared.buffers.free_count(), 1, "{name}: the buffer is back");
    }
}

#[test]
fn sgls_scatter_gather_and_discard_data() {
    for (name, mut rig) in host_and_device_variants() {
        let (low, high) = (DATA, DATA + 0x3000);
        let bytes = rig.fill_with_random_bytes(low, 1024, 3);
        let descriptors = |list: &[Descriptor]| -> Vec<u8> {
            list.iter().flat_map(|descriptor| descriptor.to_bytes()).collect()
        };
        let block = Descriptor::data_block;
        let gather = [block(low + 24, 1000), Descriptor::bit_bucket(9), block(low, 24)];
        rig.write_host_memory(0x6000, &descriptors(&gather));
        let list = Descriptor::last_segment(0x6000, 48);
        let sgl = |opcode| io_command(opcode, 3, 2).with_psdt(DataPointer::Sgl).with_sgl1(list);
        rig.run_successfully(sgl(IoOpcode::Write));
        let expected = [&bytes[24..], &bytes[..24]].concat();
        assert_eq!(rig.device.contents().bytes[3 * 512..][..1024], expected, "{name}");

        let scatter = [block(high, 100), Descriptor::bit_bucket(800), block(high + 100, 124)];
        rig.write_host_memory(0x6000, &descriptors(&scatter));
        rig.write_host_memory(high, &[0xee; 300]);
        rig.run_successfully(sgl(IoOpcode::Read));
        let seen = rig.read_host_memory(high, 225);
        assert_eq!(seen[..100], expected[..100], "{name}");
        assert_eq!(seen[100..224], expected[900..], "{name}");
        assert_eq!(seen[224], 0xee, "{name}: not a byte more");
    }
}

#[test]
fn write_zeroes_verify_write_uncorrectable_and_deallocate_take_effect() {
    for (name, mut rig) in host_and_device_variants() {
        let knows_all = rig.device_operations().has(Operation::WriteUncorrectable);
        rig.device.contents().bytes.fill(0xaa);
        rig.run_successfully(io_command(IoOpcode::WriteZeroes, 5, 7));
        rig.run_successfully(io_command(IoOpcode::Verify, 0, 64));
        let bytes = rig.device.contents().bytes.clone();
        assert!(bytes[5 * 512..12 * 512].iter().all(|byte| *byte == 0), "{name}");
        assert_eq!((bytes[5 * 512 - 1], bytes[12 * 512]), (0xaa, 0xaa), "{name}: nothing else");

        let mut ranges = Vec::new();
        for (lba, blocks) in [(100_u64, 4_u32), (7, 0), (200, 1)] {
            ranges.extend([0; 4]);
            ranges.extend(blocks.to_le_bytes());
            ranges.extend(lba.to_le_bytes());
        }
        rig.write_host_memory(DATA, &ranges);
        let manage = io_command(IoOpcode::DatasetManagement, 0, 1).with_cdw12(0).with_cdw10(2);
        rig.run_successfully(manage);
        assert_eq!(rig.device.contents().bytes[100 * 512], 0xaa, "{name}: only a hint");
        rig.run_successfully(manage.with_cdw11(1 << 2));
        let expected = if knows_all { 0 } else { 0xaa };
        let bytes = rig.device.contents().bytes.clone();
        assert!(bytes[100 * 512..104 * 512].iter().all(|byte| *byte == expected), "{name}");
        assert_eq!((bytes[200 * 512], bytes[104 * 512]), (expected, 0xaa), "{name}");

        let status = rig.run_for_status(io_command(IoOpcode::WriteUncorrectable, 9, 1));
        if knows_all {
            assert_eq!(status, Status::SUCCESS);
            for opcode in [IoOpcode::Read, IoOpcode::Verify, IoOpcode::Compare] {
                let status = rig.run_for_status(io_command(opcode, 8, 2));
                assert!(
                    status.has_same_code_as(Status::UNRECOVERED_READ_ERROR),
                    "{name}: {status}"
                );
            }
        } else {
            assert_eq!(status, Status::INVALID_OPCODE.with_dnr(), "{name}");
        }
    }
}

#[test]
fn copy_writes_its_source_ranges_consecutively() {
    for (name, mut rig) in host_and_device_variants() {
        let image: Vec<u8> =
            (0..512 * 512_usize).map(|at| (at / 512 % 251).to_le_bytes()[0]).collect();
        rig.device.contents().bytes.copy_from_slice(&image);
        for (format, size) in [(0_u32, 32_usize), (1, 40)] {
            let mut ranges = Vec::new();
            for (lba, blocks) in [(10_u64, 7_u16), (40, 1), (3, 2)] {
                let mut range = vec![0; size];
                range[8..16].copy_from_slice(&lba.to_le_bytes());
                range[16..18].copy_from_slice(&(blocks - 1).to_le_bytes());
                ranges.extend(range);
            }
            rig.write_host_memory(DATA, &ranges);
            let to = 300 + u64::from(format) * 50;
            rig.run_successfully(io_command(IoOpcode::Copy, to, 1).with_cdw12(2 | format << 8));
            let expected =
                [&image[10 * 512..17 * 512], &image[40 * 512..41 * 512], &image[3 * 512..5 * 512]]
                    .concat();
            let at = usize::try_from(to).unwrap() * 512;
            assert_eq!(
                rig.device.contents().bytes[at..][..5120],
                expected,
                "{name} format {format}"
            );
        }
    }
}

#[test]
fn failed_copy_reports_the_first_failed_range() {
    for (name, mut rig) in host_and_device_variants() {
        if !rig.device_operations().has(Operation::Copy) {
            rig.device.contents().uncorrectable.insert(40);
            let mut ranges = vec![0; 64];
            ranges[8] = 10;
            ranges[40] = 40;
            rig.write_host_memory(DATA, &ranges);
            let completion = rig.run_command(io_command(IoOpcode::Copy, 300, 1).with_cdw12(1));
            assert!(completion.status().has_same_code_as(Status::UNRECOVERED_READ_ERROR), "{name}");
            assert_eq!(completion.dw0(), 1, "{name}");
        }
    }
}

#[test]
fn fua_and_disabled_write_cache_reach_the_block_device() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, 64));
    let fua = 1 << 30;
    let limited_retry = 1 << 31;
    rig.run_successfully(io_command(IoOpcode::Write, 0, 1).with_cdw12(fua));
    rig.run_successfully(io_command(IoOpcode::Read, 0, 1).with_cdw12(fua | limited_retry));
    rig.run_successfully(
        io_command(IoOpcode::Write, 0, 16).with_prp(DATA, DATA + 0x1000).with_cdw12(fua | 15),
    );
    rig.run_successfully(io_command(IoOpcode::WriteZeroes, 0, 1).with_cdw12(fua | 1 << 25));
    rig.run_successfully(io_command(IoOpcode::Write, 0, 1));
    rig.shared.is_write_through.store(true, Ordering::Relaxed);
    rig.run_successfully(io_command(IoOpcode::Write, 0, 1));
    rig.run_successfully(io_command(IoOpcode::Read, 0, 1));
    let flags: Vec<RequestFlags> =
        rig.device.contents().log.iter().map(|request| request.flags).collect();
    let expected = [
        RequestFlags::FUA,
        RequestFlags::FUA.union(RequestFlags::LIMITED_RETRY),
        RequestFlags::FUA,
        RequestFlags::FUA.union(RequestFlags::DEALLOCATE),
        RequestFlags::NONE,
        RequestFlags::FUA,
        RequestFlags::NONE,
    ];
    assert_eq!(flags, expected);
}

#[test]
fn flush_reaches_the_block_device_or_reports_its_error() {
    let flush = tenmil_wire::Command::new(IoOpcode::Flush.code());
    let cases = [
        (true, Durability::VolatileCache, Status::SUCCESS, 1),
        (true, Durability::Persistent, Status::SUCCESS, 1),
        (false, Durability::Persistent, Status::SUCCESS, 0),
        (false, Durability::NonPersistent, Status::SUCCESS, 0),
        (false, Durability::VolatileCache, Status::INVALID_OPCODE.with_dnr(), 0),
    ];
    for (can_flush, durability, expected, flushes) in cases {
        for nsid in [1, 0xffff_ffff] {
            let ram = fixture_ram();
            let device = FakeDevice::new(&ram, 64).with_limits(|limits| {
                limits.durability = durability;
                if !can_flush {
                    limits.operations =
                        OperationSet::from_operations(&[Operation::Read, Operation::Write]);
                }
            });
            let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, device);
            let status = rig.run_for_status(flush.with_nsid(nsid));
            assert!(
                status.has_same_code_as(expected),
                "{can_flush} {durability:?} {nsid:x}: {status}"
            );
            assert_eq!(rig.device.contents().log.len(), flushes);
        }
    }
}

#[test]
fn namespace_blocks_may_be_larger_than_device_blocks() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, 64));
    rig.change_namespace(|namespace| {
        namespace.block_shift = 12;
        namespace.block_count = 8;
    });
    let bytes = rig.fill_with_random_bytes(DATA, 8192, 5);
    rig.run_successfully(io_command(IoOpcode::Write, 6, 1));
    rig.run_successfully(io_command(IoOpcode::Write, 2, 2));
    assert_eq!(rig.device.contents().bytes[6 * 4096..7 * 4096], bytes[..4096]);
    assert_eq!(rig.device.contents().bytes[2 * 4096..4 * 4096], bytes);
    assert_eq!(
        rig.run_for_status(io_command(IoOpcode::Read, 7, 2)),
        Status::LBA_OUT_OF_RANGE.with_dnr()
    );
    rig.run_successfully(io_command(IoOpcode::WriteZeroes, 6, 2));
    assert!(rig.device.contents().bytes[6 * 4096..].iter().all(|byte| *byte == 0));
}

#[test]
fn io_counters_count_each_command_once() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, 64));
    rig.run_successfully(io_command(IoOpcode::Write, 0, 1));
    rig.run_successfully(io_command(IoOpcode::Write, 0, 16));
    rig.run_successfully(io_command(IoOpcode::Read, 0, 8));
    rig.run_successfully(io_command(IoOpcode::Compare, 0, 1));
    rig.run_successfully(io_command(IoOpcode::Verify, 0, 2));
    rig.poll();
    let traffic = rig.queue.take_io_totals();
    assert_eq!((traffic.write_commands, traffic.written_bytes), (2, 17 * 512));
    assert_eq!((traffic.read_commands, traffic.read_bytes), (2, 11 * 512));
    let idle = rig.queue.take_io_totals();
    assert_eq!(idle, crate::controller::transport_interface::IoTotals::default(), "reported once");
}

/// A reconnecting host would assume that nothing was lost.
#[test]
fn cache_instance_is_valid_until_a_flush_fails() {
    let flush = tenmil_wire::Command::new(IoOpcode::Flush.code()).with_nsid(1);
    let ram = fixture_ram();
    let device = FakeDevice::new(&ram, 64)
        .with_limits(|limits| limits.durability = Durability::VolatileCache);
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, device);
    let voucher = RevocableCacheInstance::new(CacheInstance([5; 16]));
    rig.change_namespace(|namespace| namespace.cache = Some(Arc::clone(&voucher)));
    assert!(rig.run_for_status(flush).is_success());
    assert_eq!(voucher.instance(), Some(CacheInstance([5; 16])));
    rig.device.contents().fails_flushes = true;
    assert!(rig.run_for_status(flush).has_same_code_as(Status::WRITE_FAULT));
    rig.device.contents().fails_flushes = false;
    assert!(rig.run_for_status(flush).is_success());
    assert_eq!(voucher.instance(), None);
}
