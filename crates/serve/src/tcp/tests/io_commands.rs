//! Commands of a well-behaved host.

use std::sync::Arc;

use tenmil_base::{Operation, Span};
use tenmil_drivers::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::{DataDirection, DigestMode, HostConfig};
use tenmil_reactor::Poller;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, PropertySize};
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::register::{Capabilities, offset};
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status};

use super::test_target::{
    BLOCKS, ENABLED, NQN, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect, pattern, read_or_write_command, service_limits,
};
use crate::tcp::ServiceLimits;

fn identify() -> Command {
    Command::new(AdminOpcode::Identify.code()).with_cdw10(1)
}

/// Data with digests arrive unchanged.
#[test]
fn digests_change_only_the_bytes_on_the_wire() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let digests = HostConfig {
        header_digest: DigestMode::Required,
        data_digest: DigestMode::Required,
        ..io_config()
    };
    let io = rig.open_connection(digests);
    assert!(rig.lines[io].terms.is_some_and(|terms| terms.header_digest && terms.data_digest));
    let completion = rig.execute_connect(io, &io_connect(1), &connect_data(cntlid));
    assert_eq!(completion.status(), Status::SUCCESS);
    for blocks in [1, 9, 256] {
        let len = blocks * 512;
        let bytes = pattern(blocks, len as usize);
        let write = read_or_write_command(IoOpcode::Write.code(), 5, blocks);
        let (completion, _) = rig.execute_command(io, &write, DataDirection::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
        let read = read_or_write_command(IoOpcode::Read.code(), 5, blocks);
        let (completion, back) = rig.execute_command(io, &read, DataDirection::ToHost(len), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(back == bytes);
    }
}

/// Some hosts accept exactly one C2HData PDU per command (SPDK's above 128 KiB). TCP 1.0 §3.6.2.9:
/// PDO counts the header and its digest, PLEN includes both digests, LAST_PDU is set in the only
/// PDU. SUCCESS replaces the response, because the queue has no flow control (§3.3.2.1).
#[test]
fn read_of_maximum_transfer_size_is_one_c2hdata_pdu() {
    const LEN: u32 = 1 << 20;
    let largest = ServiceLimits { transfer_bytes_max: LEN, ..service_limits() };
    for (use_digest, digest, pdo, flags) in
        [(DigestMode::Off, 0, 24, 0x0c), (DigestMode::Required, 4, 28, 0x0f)]
    {
        let mut rig = TestTarget::with_options(largest, |config| config);
        let (_, cntlid) = rig.connect_admin_queue();
        let io = rig.open_connection(HostConfig {
            header_digest: use_digest,
            data_digest: use_digest,
            ..io_config()
        });
        let completion = rig.execute_connect(io, &io_connect(1), &connect_data(cntlid));
        assert_eq!(completion.status(), Status::SUCCESS);
        let blocks = LEN / 512;
        let bytes = pattern(blocks, LEN as usize);
        let write = read_or_write_command(IoOpcode::Write.code(), 7, blocks);
        let (completion, _) = rig.execute_command(io, &write, DataDirection::FromHost(LEN), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
        let before = rig.lines[io].received.len();
        let read = read_or_write_command(IoOpcode::Read.code(), 7, blocks);
        let (completion, back) = rig.execute_command(io, &read, DataDirection::ToHost(LEN), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(back == bytes);
        let received = &rig.lines[io].received[before..];
        let dword = |at: usize| u32::from_le_bytes(*received[at..].first_chunk().unwrap());
        // Type, FLAGS, HLEN, PDO.
        assert_eq!(received[..4], [0x07, flags, 24, pdo]);
        let plen = u32::from(pdo) + LEN + digest;
        assert_eq!((dword(4), dword(12), dword(16)), (plen, 0, LEN), "PLEN, DATAO, DATAL");
        assert_eq!(received.len(), plen as usize, "and nothing after it");
    }
}

#[test]
fn host_connects_enables_identifies_writes_and_reads() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let cap = Capabilities(rig.get_property(admin, offset::CAP, PropertySize::Eight).result());
    assert_eq!((cap.mqes(), cap.css_nvm(), cap.mpsmin()), (128, true, 0));
    let (completion, page) =
        rig.execute_command(admin, &identify(), DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let page = IdentifyController::from_bytes(page.first_chunk().unwrap());
    assert_eq!(page.subnqn().trimmed(), NQN.as_bytes());
    assert_eq!((page.cntlid(), page.ioccsz(), page.cqt()), (cntlid, 516, 1000));

    let io = rig.connect_io_queue(cntlid, 1);
    for (index, blocks) in (0_u32..).zip([1, 8, 16, 17, 100, 256]) {
        let bytes = pattern(index, blocks as usize * 512);
        let len = u32::try_from(bytes.len()).unwrap();
        let lba = u64::from(index) * 300;
        let write = read_or_write_command(IoOpcode::Write.code(), lba, blocks);
        let (completion, _) = rig.execute_command(io, &write, DataDirection::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS, "write {blocks}");
        let read = read_or_write_command(IoOpcode::Read.code(), lba, blocks);
        let (completion, back) = rig.execute_command(io, &read, DataDirection::ToHost(len), &[]);
        assert_eq!(completion.status(), Status::SUCCESS, "read {blocks}");
        assert!(back == bytes, "{blocks} blocks are those that were written");
    }
    rig.lines.clear();
    rig.assert_all_released();
}

/// The controller completes these commands, not the I/O queue; no other command is outstanding
/// whose completion would cause them to be reported.
#[test]
fn reservation_commands_complete_when_outstanding_commands_are_done() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let keys = [[0; 8], [7; 8]].concat();
    let register = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
    let (completion, _) = rig.execute_command(io, &register, DataDirection::FromHost(16), &keys);
    assert_eq!(completion.status(), Status::SUCCESS);
    // 32 dwords, in the extended format for 128-bit host identifiers.
    let report = Command::new(IoOpcode::ReservationReport.code()).with_nsid(1);
    let report = report.with_cdw10(31).with_cdw11(1);
    let (completion, bytes) = rig.execute_command(io, &report, DataDirection::ToHost(128), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(bytes[5], 1, "one has registered");
    rig.lines.clear();
    rig.assert_all_released();
}

/// 16 different bytes: Connect, the feature and the report must show them in the same order.
#[test]
fn host_identifier_feature_returns_the_hostid_of_connect() {
    let id: [u8; 16] = std::array::from_fn(|at| u8::try_from(at).unwrap() * 16 + 1);
    let mut rig = TestTarget::new();
    let connect = |rig: &mut TestTarget, line, connect: &Connect, cntlid| {
        let data = connect_data(cntlid).with(|data| data.hostid(id));
        let completion = rig.execute_connect(line, connect, &data);
        assert_eq!(completion.status(), Status::SUCCESS);
        u16::try_from(completion.dw0()).unwrap()
    };
    let admin = rig.open_connection(admin_config());
    let cntlid = connect(&mut rig, admin, &admin_connect(), CNTLID_DYNAMIC);
    rig.set_property(admin, offset::CC, ENABLED);
    let io = rig.open_connection(io_config());
    connect(&mut rig, io, &io_connect(1), cntlid);

    let get = Command::new(AdminOpcode::GetFeatures.code()).with_cdw10(0x81).with_cdw11(1);
    let (completion, bytes) = rig.execute_command(admin, &get, DataDirection::ToHost(16), &[]);
    assert_eq!((completion.status(), &bytes[..]), (Status::SUCCESS, &id[..]));
    let register = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
    let keys = [[0; 8], [7; 8]].concat();
    let (completion, _) = rig.execute_command(io, &register, DataDirection::FromHost(16), &keys);
    assert_eq!(completion.status(), Status::SUCCESS);
    let report = Command::new(IoOpcode::ReservationReport.code()).with_nsid(1);
    let report = report.with_cdw10(31).with_cdw11(1);
    let (_, bytes) = rig.execute_command(io, &report, DataDirection::ToHost(128), &[]);
    // The first registrant follows a header of 64 bytes; its identifier follows its key.
    assert_eq!(&bytes[64 + 16..64 + 32], &id);
    rig.lines.clear();
    rig.assert_all_released();
}

/// Zero is not an identifier: two hosts with identifier zero stay different, and cannot use
/// reservations.
#[test]
fn hosts_without_hostid_are_separate_registrants() {
    let mut rig = TestTarget::new();
    for _ in 0..2 {
        let admin = rig.open_connection(admin_config());
        let without_hostid = connect_data(CNTLID_DYNAMIC).with(|data| data.hostid([0; 16]));
        let cntlid =
            u16::try_from(rig.execute_connect(admin, &admin_connect(), &without_hostid).dw0())
                .unwrap();
        rig.set_property(admin, offset::CC, ENABLED);
        let io = rig.open_connection(io_config());
        let without_hostid = connect_data(cntlid).with(|data| data.hostid([0; 16]));
        assert_eq!(
            rig.execute_connect(io, &io_connect(1), &without_hostid).status(),
            Status::SUCCESS
        );
        let register = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
        let (completion, _) =
            rig.execute_command(io, &register, DataDirection::FromHost(16), &[1; 16]);
        assert_eq!(completion.status(), Status::HOST_IDENTIFIER_NOT_INITIALIZED.with_dnr());
        let write = read_or_write_command(IoOpcode::Write.code(), 0, 1);
        let (completion, _) =
            rig.execute_command(io, &write, DataDirection::FromHost(512), &[0; 512]);
        assert_eq!(completion.status(), Status::SUCCESS, "all else works");
    }
}

/// Some hosts send feature data from a buffer of a whole page.
#[test]
fn excess_data_of_a_command_is_ignored() {
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    let set = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0e);
    let timestamp = [1, 2, 3, 4, 5, 6, 0, 0];
    let page = [&timestamp[..], &[0xff; 4088]].concat();
    for (len, status) in [
        (4096_u32, Status::SUCCESS),
        (8, Status::SUCCESS),
        (4, Status::DATA_SGL_LENGTH_INVALID.with_dnr()),
    ] {
        let bytes = &page[..len as usize];
        let (completion, _) = rig.execute_command(admin, &set, DataDirection::FromHost(len), bytes);
        assert_eq!(completion.status(), status, "{len} bytes");
    }
    let get = Command::new(AdminOpcode::GetFeatures.code()).with_cdw10(0x0e);
    let (completion, bytes) = rig.execute_command(admin, &get, DataDirection::ToHost(8), &[]);
    assert_eq!((completion.status(), &bytes[..6]), (Status::SUCCESS, &timestamp[..6]));
}

#[test]
fn connection_samples_show_host_and_queue() {
    let mut rig = TestTarget::new();
    let stranger = rig.open_connection(io_config());
    let (_, cntlid) = rig.connect_admin_queue();
    let digests = HostConfig { data_digest: DigestMode::Required, ..io_config() };
    let io = rig.open_connection(digests);
    rig.execute_connect(io, &io_connect(1), &connect_data(cntlid));
    let shown = rig.service.connections();
    let queues: Vec<_> = shown.iter().map(|one| (one.cntlid, one.queue)).collect();
    assert_eq!(queues, [(None, None), (Some(cntlid), Some(0)), (Some(cntlid), Some(1))]);
    let named = |host: &str| Some(host.to_owned());
    assert_eq!((&shown[0].host, &shown[2].host), (&None, &named(super::test_target::HOST)));
    assert_eq!((&shown[2].subsystem, shown[2].peer.as_str()), (&named(NQN), "pipe"));
    assert_eq!((shown[2].header_digest, shown[2].data_digest), (false, true));
    assert_eq!((shown[0].memory_bytes, shown[2].memory_bytes), (8192, 8192));
    // One connection with free memory, and one whose memory is in use.
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 256);
    rig.lines[io].is_deaf = true;
    rig.lines[io].submit(&read, DataDirection::ToHost(128 << 10), &[]);
    rig.run_until_idle();
    let held: u64 = rig.service.connections().iter().map(|one| one.memory_bytes).sum();
    let budget = rig.service.buffer_pool();
    assert_eq!(held, budget.size_bytes() - budget.free_bytes());
    rig.lines[stranger].pipe = None;
    rig.run_until_idle();
    assert_eq!(rig.service.connections().len(), 2);
}

/// A read of a device that takes this long, and a connection that has executed some, each for itself.
fn read_from_slow_device(mean: Span) -> (TestTarget, usize, Command) {
    let mut subsystem = None;
    let mut rig = TestTarget::with_options(service_limits(), |config| {
        subsystem = Some(config.subsystem.clone());
        config
    });
    let slow = LatencySpec { mean, p99: None };
    let ram = Arc::new(RamDevice::new(&rig.regions, 512, BLOCKS).unwrap());
    let medium = DelayDevice::new(ram, DelaySettings { read: slow, write: slow }, 1).unwrap();
    subsystem.unwrap().add_namespace(NamespaceConfig::new(Arc::new(medium))).unwrap();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 1).with_nsid(2);
    for _ in 0..100 {
        let tag = rig.lines[io].submit(&read, DataDirection::ToHost(512), &[]);
        rig.run_until_idle();
        while rig.lines[io].done.remove(&tag).is_none() {
            rig.advance_time(Span::from_us(1));
        }
        // Idle time between the commands does not count as latency.
        rig.advance_time(Span::from_ms(3));
    }
    (rig, io, read)
}

/// A reactor in hybrid mode sleeps for this time.
#[test]
fn connection_reports_mean_latency_of_outstanding_commands() {
    let (mut rig, io, read) = read_from_slow_device(Span::from_us(80));
    let expected = |rig: &TestTarget| -> Vec<Span> {
        rig.guests.iter().filter_map(|guest| guest.expected_latency()).collect()
    };
    assert_eq!(expected(&rig), [], "nothing is under way");
    rig.lines[io].submit(&read, DataDirection::ToHost(512), &[]);
    rig.run_until_idle();
    let [latency] = expected(&rig)[..] else { panic!("one has something under way") };
    assert!((78_000..=82_000).contains(&latency.ns), "{latency}");
}

/// The admin connection is not spun for, and that of I/Os is unless they take long.
#[test]
fn connection_of_a_slow_device_is_not_spun_for() {
    for (us, helps) in [(80, [false, true]), (500, [false; 2])] {
        let (rig, ..) = read_from_slow_device(Span::from_us(us));
        let found: Vec<bool> = rig.guests.iter().map(|guest| guest.can_spin_help()).collect();
        assert_eq!(found, helps, "{us} us");
    }
}

#[test]
fn commands_are_counted_by_host_and_namespace_also_after_the_host_has_left() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    for blocks in [1, 8, 8] {
        let len = blocks * 512;
        let write = read_or_write_command(IoOpcode::Write.code(), 4, blocks);
        let bytes = pattern(blocks, len as usize);
        let (completion, _) = rig.execute_command(io, &write, DataDirection::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    let read = read_or_write_command(IoOpcode::Read.code(), 4, 8);
    rig.execute_command(io, &read, DataDirection::ToHost(4096), &[]);
    let beyond = read_or_write_command(IoOpcode::Read.code(), BLOCKS, 8);
    let (completion, _) = rig.execute_command(io, &beyond, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
    let counted = |rig: &TestTarget| {
        let [(nqn, samples)] = &rig.service.io_stats()[..] else { panic!() };
        let [sample] = &samples[..] else { panic!("{samples:?}") };
        assert_eq!((nqn.as_str(), sample.nsid), (NQN, 1));
        assert!(!sample.host.is_empty());
        let of = |operation| {
            let one = sample.stats.operation_stats(operation);
            (one.count, one.bytes, one.errors)
        };
        assert_eq!(of(Operation::Write), (3, 17 * 512, 0));
        assert_eq!(of(Operation::Read), (1, 4096, 1));
        sample.queue
    };
    assert_eq!(counted(&rig), Some((cntlid, 1)));
    rig.lines.clear();
    rig.assert_all_released();
    assert_eq!(counted(&rig), None);
}
