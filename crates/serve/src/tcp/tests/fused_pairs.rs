//! Fused pairs: one buffer for two commands that both start or both fail.

use tenmil_base::{Random, Span};
use tenmil_nvme_tcp::{DataDirection, DigestMode, HostConfig};
use tenmil_wire::fabrics::CNTLID_DYNAMIC;
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::{AdminOpcode, Command, Fuse, IoOpcode, Status, TypedCommand};

use super::test_target::{
    BLOCKS, TestTarget, admin_config, admin_connect, connect_data, io_config, io_connect, pattern,
    read_or_write_command, service_limits,
};
use crate::tcp::ServiceLimits;

const OK: Status = Status::SUCCESS;
const MISSING: Status = Status::ABORTED_MISSING_FUSED;
const FAILED: Status = Status::ABORTED_FAILED_FUSED;
const FIELD: Status = Status::INVALID_FIELD.with_dnr();

/// Host configurations that send data in the capsule and after an R2T.
fn in_capsule_and_r2t_configs() -> [HostConfig; 2] {
    [io_config(), HostConfig { in_capsule_bytes: 0, ..io_config() }]
}

/// Connects an I/O queue of a controller with this host configuration.
fn connect_io_queue(rig: &mut TestTarget, (cntlid, qid): (u16, u16), config: HostConfig) -> usize {
    let line = rig.open_connection(config);
    let completion = rig.execute_connect(line, &io_connect(qid), &connect_data(cntlid));
    assert_eq!(completion.status(), OK);
    line
}

fn fused_command(opcode: IoOpcode, lba: u64, blocks: u32) -> Command {
    let fuse = if opcode == IoOpcode::Compare { Fuse::First } else { Fuse::Second };
    read_or_write_command(opcode.code(), lba, blocks).with_fuse(fuse)
}

/// Submits a command with data to the controller.
fn submit_command(rig: &mut TestTarget, line: usize, command: &Command, bytes: &[u8]) -> u16 {
    let len = u32::try_from(bytes.len()).unwrap();
    rig.lines[line].submit(command, DataDirection::FromHost(len), bytes)
}

/// Submits a fused pair on the blocks that `old` and `new` cover.
fn submit_fused_pair(
    rig: &mut TestTarget,
    line: usize,
    lba: u64,
    [old, new]: [&[u8]; 2],
) -> [u16; 2] {
    let blocks = u32::try_from(old.len() / 512).unwrap();
    [
        submit_command(rig, line, &fused_command(IoOpcode::Compare, lba, blocks), old),
        submit_command(rig, line, &fused_command(IoOpcode::Write, lba, blocks), new),
    ]
}

/// Status of each command that has completed.
fn completion_statuses<const N: usize>(
    rig: &mut TestTarget,
    line: usize,
    tags: [u16; N],
) -> [Option<Status>; N] {
    tags.map(|tag| rig.lines[line].done.remove(&tag).map(|(completion, _)| completion.status()))
}

/// Status of the commands, all of which must complete.
fn run_and_complete_all<const N: usize>(
    rig: &mut TestTarget,
    line: usize,
    tags: [u16; N],
) -> [Status; N] {
    rig.run_until_idle();
    completion_statuses(rig, line, tags).map(|status| status.expect("it has ended"))
}

fn read_blocks(rig: &mut TestTarget, line: usize, lba: u64, len: u32) -> Vec<u8> {
    let read = read_or_write_command(IoOpcode::Read.code(), lba, len / 512);
    let (completion, bytes) = rig.execute_command(line, &read, DataDirection::ToHost(len), &[]);
    assert_eq!(completion.status(), OK);
    bytes
}

fn disconnect_all_and_assert_empty(mut rig: TestTarget) {
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn compare_and_write_writes_only_if_the_data_compare_equal() {
    for way in in_capsule_and_r2t_configs() {
        for narrow in [None, Some(700)] {
            let mut rig = TestTarget::new();
            rig.narrow = narrow;
            let (admin, cntlid) = rig.connect_admin_queue();
            let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
            let (_, page) = rig.execute_command(admin, &identify, DataDirection::ToHost(4096), &[]);
            let page = IdentifyController::from_bytes(page.first_chunk().unwrap());
            assert_eq!((page.fuses(), page.acwu()), (1, 0), "one block at least");
            let io = connect_io_queue(&mut rig, (cntlid, 1), way);
            for blocks in [1, 3, 8] {
                let (zeroes, bytes) = (vec![0; blocks * 512], pattern(5, blocks * 512));
                let lba = blocks as u64 * 100;
                let good = submit_fused_pair(&mut rig, io, lba, [&zeroes, &bytes]);
                assert_eq!(run_and_complete_all(&mut rig, io, good), [OK, OK]);
                let len = u32::try_from(bytes.len()).unwrap();
                assert!(read_blocks(&mut rig, io, lba, len) == bytes);
                let bad =
                    submit_fused_pair(&mut rig, io, lba, [&zeroes, &pattern(6, blocks * 512)]);
                let [compare, write] = run_and_complete_all(&mut rig, io, bad);
                assert!(compare.has_same_code_as(Status::COMPARE_FAILURE) && write == FAILED);
                assert!(read_blocks(&mut rig, io, lba, len) == bytes, "nothing was written");
            }
            disconnect_all_and_assert_empty(rig);
        }
    }
}

/// Three hosts increment one counter by fused pairs, each based on the value it knows; the final
/// value equals the number of successful pairs.
#[test]
fn fused_pairs_of_several_hosts_are_atomic() {
    for seed in 0..12 {
        let mut rig = TestTarget::new();
        let lines = [1, 2, 3].map(|number| rig.connect_host_with_io_queue(number).1);
        let mut random = Random::new(seed);
        let (mut added, mut failed) = (0_u64, 0);
        let mut known = [0_u64; 3];
        for _ in 0..60 {
            let mut asked = Vec::new();
            for host in 0..3 {
                if random.below(3) > 0 {
                    let block = |value: u64| [value.to_le_bytes(); 64].concat();
                    let [old, new] = [known[host], known[host] + 1].map(block);
                    asked.push((host, submit_fused_pair(&mut rig, lines[host], 9, [&old, &new])));
                }
            }
            // Plain writes to other blocks and reads are interleaved.
            let other = read_or_write_command(IoOpcode::Write.code(), 100, 8);
            let at = lines[usize::try_from(random.below(3)).unwrap()];
            submit_command(&mut rig, at, &other, &pattern(1, 4096));
            rig.run_until_idle();
            for (host, tags) in asked {
                match run_and_complete_all(&mut rig, lines[host], tags) {
                    [OK, OK] => added += 1,
                    [compare, FAILED] if compare.has_same_code_as(Status::COMPARE_FAILURE) => {
                        failed += 1
                    }
                    other => panic!("{other:?}"),
                }
                let bytes = read_blocks(&mut rig, lines[host], 9, 512);
                known[host] = u64::from_le_bytes(*bytes.first_chunk().unwrap());
            }
        }
        let bytes = read_blocks(&mut rig, lines[0], 9, 512);
        assert_eq!(u64::from_le_bytes(*bytes.first_chunk().unwrap()), added);
        assert!(added > 20 && failed > 10, "{added} were added, {failed} came too late");
    }
}

#[test]
fn fused_first_without_second_is_aborted() {
    for way in in_capsule_and_r2t_configs() {
        let mut rig = TestTarget::new();
        let (_, cntlid) = rig.connect_admin_queue();
        let io = connect_io_queue(&mut rig, (cntlid, 1), way);
        let [first, second] =
            [IoOpcode::Compare, IoOpcode::Write].map(|op| fused_command(op, 0, 1));
        let block = [0; 512];
        let alone = submit_command(&mut rig, io, &second, &block);
        assert_eq!(run_and_complete_all(&mut rig, io, [alone]), [MISSING]);
        // Any other command breaks the pair, with or without data, even if that command itself
        // fails.
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 1);
        let flush = Command::new(IoOpcode::Flush.code()).with_nsid(1);
        for (next, data) in [(read, DataDirection::ToHost(512)), (flush, DataDirection::None)] {
            let tag = submit_command(&mut rig, io, &first, &block);
            rig.run_until_idle();
            assert_eq!(completion_statuses(&mut rig, io, [tag]), [None], "its other half may come");
            let next = rig.lines[io].submit(&next, data, &[]);
            assert_eq!(run_and_complete_all(&mut rig, io, [tag, next]), [MISSING, OK]);
        }
        let long = submit_command(&mut rig, io, &first, &block);
        let write = read_or_write_command(IoOpcode::Write.code(), 0, 400);
        let other = submit_command(&mut rig, io, &write, &vec![0; 400 * 512]);
        let [missing, refused] = run_and_complete_all(&mut rig, io, [long, other]);
        assert!(
            missing == MISSING && refused.has_same_code_as(Status::DATA_SGL_LENGTH_INVALID),
            "{refused:?}"
        );
        let tags =
            [&first, &first, &second].map(|command| submit_command(&mut rig, io, command, &block));
        assert_eq!(run_and_complete_all(&mut rig, io, tags), [MISSING, OK, OK]);
        let reserved =
            read_or_write_command(IoOpcode::Write.code(), 0, 1).with_fuse(Fuse::Reserved);
        let tags = [&first, &reserved].map(|command| submit_command(&mut rig, io, command, &block));
        assert_eq!(run_and_complete_all(&mut rig, io, tags), [MISSING, FIELD]);
        // A Fabrics command never belongs to a fused pair, whatever its FUSE field.
        let tag = submit_command(&mut rig, io, &first, &block);
        let other = Command::new(AdminOpcode::FabricsCommands.code()).with_fuse(Fuse::Second);
        let other = rig.lines[io].submit(&other, DataDirection::None, &[]);
        let [missing, refused] = run_and_complete_all(&mut rig, io, [tag, other]);
        assert!(missing == MISSING && !refused.is_success());
        disconnect_all_and_assert_empty(rig);
    }
}

/// Submits a command behind a pair that is complete but has not started; returns the status of all
/// three.
fn statuses_of_pair_and_command(
    rig: &mut TestTarget,
    io: usize,
    command: &Command,
    data: DataDirection,
) -> [Status; 3] {
    let block = [0; 512];
    let [first, second] = submit_fused_pair(rig, io, 0, [&block, &block]);
    let len = if let DataDirection::FromHost(len) = data { len as usize } else { 0 };
    let third = rig.lines[io].submit(command, data, &vec![0xee; len]);
    run_and_complete_all(rig, io, [first, second, third])
}

#[test]
fn non_fusible_command_is_rejected_while_others_wait() {
    for fuse in [Fuse::First, Fuse::Second, Fuse::Reserved] {
        let mut rig = TestTarget::new();
        let (_, cntlid) = rig.connect_admin_queue();
        let io = connect_io_queue(&mut rig, (cntlid, 1), in_capsule_and_r2t_configs()[0]);
        let fabrics = AdminOpcode::FabricsCommands.code();
        let (compare, write) = (IoOpcode::Compare.code(), IoOpcode::Write.code());
        let cases = [
            (Command::new(fabrics).with_nsid(5), DataDirection::FromHost(128 << 10)),
            (Command::new(fabrics).with_nsid(6), DataDirection::ToHost(4096)),
            (Command::new(fabrics).with_nsid(8), DataDirection::None),
            (
                read_or_write_command(IoOpcode::Read.code(), 0, 256),
                DataDirection::ToHost(128 << 10),
            ),
            (read_or_write_command(0x81, 0, 256), DataDirection::FromHost(128 << 10)),
            (Command::new(IoOpcode::Flush.code()).with_nsid(1), DataDirection::None),
            (
                read_or_write_command(if fuse == Fuse::First { write } else { compare }, 0, 1),
                DataDirection::FromHost(512),
            ),
        ];
        for (command, data) in cases {
            let ends = statuses_of_pair_and_command(&mut rig, io, &command.with_fuse(fuse), data);
            assert_eq!(ends, [OK, OK, FIELD], "{fuse:?} {command:?}");
        }
        disconnect_all_and_assert_empty(rig);
    }
}

#[test]
fn mismatched_fused_commands_both_fail() {
    for way in in_capsule_and_r2t_configs() {
        let mut rig = TestTarget::new();
        let (_, cntlid) = rig.connect_admin_queue();
        let io = connect_io_queue(&mut rig, (cntlid, 1), way);
        let (compare, write) = (IoOpcode::Compare, IoOpcode::Write);
        let block = pattern(3, 9 * 512);
        let cases = [
            // The halves differ in size, in position, or in order.
            (fused_command(compare, 0, 1), 512, fused_command(write, 0, 2), 1024, [FIELD; 2]),
            (fused_command(compare, 0, 1), 512, fused_command(write, 1, 1), 512, [FIELD; 2]),
            (
                fused_command(write, 0, 1).with_fuse(Fuse::First),
                512,
                fused_command(compare, 0, 1).with_fuse(Fuse::Second),
                512,
                [FIELD; 2],
            ),
            // The data size does not match the number of blocks.
            (
                fused_command(compare, 0, 2),
                512,
                fused_command(write, 0, 2),
                512,
                [Status::DATA_SGL_LENGTH_INVALID.with_dnr(), FAILED],
            ),
            (
                fused_command(compare, BLOCKS, 1),
                512,
                fused_command(write, BLOCKS, 1),
                512,
                [Status::LBA_OUT_OF_RANGE.with_dnr(), FAILED],
            ),
            // More than a page of data.
            (
                fused_command(compare, 0, 9),
                9 * 512,
                fused_command(write, 0, 9),
                9 * 512,
                [Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr(), MISSING],
            ),
        ];
        for (first, first_len, second, second_len, expected) in cases {
            let tags = [
                submit_command(&mut rig, io, &first, &block[..first_len]),
                submit_command(&mut rig, io, &second, &block[..second_len]),
            ];
            assert_eq!(run_and_complete_all(&mut rig, io, tags), expected, "{first:?} {second:?}");
        }
        // Halves without data, or with data to the host.
        let first = fused_command(compare, 0, 1);
        for (command, data) in [
            (first, DataDirection::None),
            (
                read_or_write_command(IoOpcode::Read.code(), 0, 1).with_fuse(Fuse::First),
                DataDirection::ToHost(512),
            ),
        ] {
            let tag = rig.lines[io].submit(&command, data, &[]);
            assert_eq!(run_and_complete_all(&mut rig, io, [tag]), [FIELD]);
            let tag = submit_command(&mut rig, io, &first, &block[..512]);
            let second = command.with_fuse(Fuse::Second);
            let other = rig.lines[io].submit(&second, data, &[]);
            assert_eq!(run_and_complete_all(&mut rig, io, [tag, other]), [FIELD; 2]);
        }
        let zeroes = [0; 512];
        let tags = submit_fused_pair(&mut rig, io, 0, [&zeroes, &zeroes]);
        assert_eq!(
            run_and_complete_all(&mut rig, io, tags),
            [OK; 2],
            "nothing has happened, and the next runs"
        );
        disconnect_all_and_assert_empty(rig);
    }
}

/// Memory for one large command, and the own pages of the connections.
#[test]
fn fused_pairs_complete_with_scarce_buffer_memory() {
    for (seed, way) in (0..4).flat_map(|seed| in_capsule_and_r2t_configs().map(|way| (seed, way))) {
        let limits =
            ServiceLimits { memory_bytes: 260 << 10, connections_max: 3, ..service_limits() };
        let mut rig = TestTarget::with_options(limits, |config| config);
        let (_, cntlid) = rig.connect_admin_queue();
        let lines = [1, 2].map(|qid| connect_io_queue(&mut rig, (cntlid, qid), way));
        let mut random = Random::new(seed);
        for _ in 0..4 {
            let mut pairs = Vec::new();
            for _ in 0..30 {
                let line = lines[usize::try_from(random.below(2)).unwrap()];
                if random.below(3) == 0 {
                    let write = read_or_write_command(IoOpcode::Write.code(), 1000, 256);
                    submit_command(&mut rig, line, &write, &pattern(7, 128 << 10));
                }
                let block = [0; 4096];
                pairs.push((line, submit_fused_pair(&mut rig, line, 8, [&block, &block])));
            }
            for (line, tags) in pairs {
                assert_eq!(run_and_complete_all(&mut rig, line, tags), [OK; 2]);
            }
        }
        disconnect_all_and_assert_empty(rig);
    }
}

#[test]
fn data_digest_error_fails_both_fused_commands() {
    for in_capsule_bytes in [0, 8192] {
        for damaged in [0, 1] {
            let mut rig = TestTarget::new();
            let (_, cntlid) = rig.connect_admin_queue();
            let config =
                HostConfig { data_digest: DigestMode::Required, in_capsule_bytes, ..io_config() };
            let io = connect_io_queue(&mut rig, (cntlid, 1), config);
            let (zeroes, bytes) = (vec![0; 512], pattern(5, 512));
            let tags = submit_fused_pair(&mut rig, io, 0, [&zeroes, &bytes]);
            rig.lines[io].damaged = Some(tags[damaged]);
            let damage = Status::TRANSIENT_TRANSPORT_ERROR;
            let expected = match (in_capsule_bytes, damaged) {
                // The first half has failed before the second arrives.
                (1.., 0) => [damage, MISSING],
                (_, 0) => [damage, FAILED],
                _ => [FAILED, damage],
            };
            assert_eq!(run_and_complete_all(&mut rig, io, tags), expected);
            rig.lines[io].damaged = None;
            assert!(read_blocks(&mut rig, io, 0, 512) == zeroes, "nothing was written");
            let tags = submit_fused_pair(&mut rig, io, 0, [&zeroes, &bytes]);
            assert_eq!(run_and_complete_all(&mut rig, io, tags), [OK; 2]);
            disconnect_all_and_assert_empty(rig);
        }
    }
}

#[test]
fn abort_of_one_fused_command_aborts_both() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let io = connect_io_queue(&mut rig, (cntlid, 1), in_capsule_and_r2t_configs()[1]);
    let block = [0; 512];
    let abort = |rig: &mut TestTarget, tag: u16| {
        let cdw10 = u32::from(tag) << 16 | 1;
        let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(cdw10);
        let (completion, _) = rig.execute_command(admin, &abort, DataDirection::None, &[]);
        assert_eq!((completion.status(), completion.dw0()), (OK, 0), "it was aborted");
    };
    let first = submit_command(&mut rig, io, &fused_command(IoOpcode::Compare, 0, 1), &block);
    rig.run_until_idle();
    abort(&mut rig, first);
    assert_eq!(run_and_complete_all(&mut rig, io, [first]), [Status::ABORT_REQUESTED]);
    let second = submit_command(&mut rig, io, &fused_command(IoOpcode::Write, 0, 1), &block);
    assert_eq!(run_and_complete_all(&mut rig, io, [second]), [MISSING]);
    disconnect_all_and_assert_empty(rig);
}

#[test]
fn host_with_overdue_second_fused_command_is_disconnected() {
    for way in in_capsule_and_r2t_configs() {
        let mut rig = TestTarget::new();
        let (_, cntlid) = rig.connect_admin_queue();
        let lines = [1, 2].map(|qid| connect_io_queue(&mut rig, (cntlid, qid), way));
        submit_command(&mut rig, lines[0], &fused_command(IoOpcode::Compare, 0, 1), &[0; 512]);
        rig.run_until_idle();
        rig.advance_time(Span::from_secs(20));
        let tags = submit_fused_pair(&mut rig, lines[1], 0, [&[0; 512], &[1; 512]]);
        assert_eq!(
            run_and_complete_all(&mut rig, lines[1], tags),
            [OK; 2],
            "half a pair blocks no command"
        );
        rig.advance_time(Span::from_secs(11));
        let gone = |new_events: &crate::tcp::TargetEvent| {
            new_events.to_string().contains("send requested data")
        };
        assert!(rig.new_events.iter().any(gone), "{:?}", rig.new_events);
        disconnect_all_and_assert_empty(rig);
    }
}

#[test]
fn fused_command_on_admin_queue_is_rejected() {
    let mut rig = TestTarget::new();
    let admin = rig.open_connection(admin_config());
    let connect = admin_connect().to_command().with_fuse(Fuse::First);
    let data = connect_data(CNTLID_DYNAMIC);
    let tag = submit_command(&mut rig, admin, &connect, data.as_bytes());
    let [status] = run_and_complete_all(&mut rig, admin, [tag]);
    assert_eq!(status, FIELD, "it cannot be half of a pair");
    disconnect_all_and_assert_empty(rig);
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    let keep_alive = Command::new(AdminOpcode::KeepAlive.code()).with_fuse(Fuse::First);
    let (completion, _) = rig.execute_command(admin, &keep_alive, DataDirection::None, &[]);
    assert!(!completion.status().is_success());
    // Host Memory Buffer: a feature with data that is not supported.
    let set = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0d).with_fuse(Fuse::First);
    let (completion, _) = rig.execute_command(admin, &set, DataDirection::FromHost(64), &[0; 64]);
    assert!(!completion.status().is_success(), "no command waits for a second half");
    // The opcodes of Compare and Write are other commands on an admin queue.
    for opcode in [IoOpcode::Compare, IoOpcode::Write] {
        let command = fused_command(opcode, 0, 1);
        let (completion, _) =
            rig.execute_command(admin, &command, DataDirection::FromHost(512), &[0; 512]);
        assert_eq!(completion.status(), FIELD, "{opcode:?}");
    }
    disconnect_all_and_assert_empty(rig);
}

/// Data of an aborted half arrive after its page was allocated to another command.
#[test]
fn late_data_of_a_failed_fused_command_is_discarded() {
    let mut rig = TestTarget::new();
    rig.narrow = Some(700);
    let (_, cntlid) = rig.connect_admin_queue();
    let io = connect_io_queue(&mut rig, (cntlid, 1), in_capsule_and_r2t_configs()[1]);
    for _ in 0..4 {
        // The service sends an R2T; the host sends another command before it reads the R2T.
        rig.lines[io].is_deaf = true;
        let first =
            submit_command(&mut rig, io, &fused_command(IoOpcode::Compare, 0, 8), &[0xee; 4096]);
        rig.run_until_idle();
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 16);
        let read = rig.lines[io].submit(&read, DataDirection::ToHost(8192), &[]);
        rig.lines[io].poll_once(rig.now);
        rig.lines[io].is_deaf = false;
        rig.run_until_idle();
        let (completion, bytes) = rig.lines[io].done.remove(&read).unwrap();
        assert_eq!(completion.status(), OK);
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(run_and_complete_all(&mut rig, io, [first]), [MISSING]);
    }
    disconnect_all_and_assert_empty(rig);
}

/// A pair waits until every connection has confirmed that it is quiescent, so a connection that
/// owes the confirmation is not idle.
#[test]
fn connection_awaiting_fused_second_does_not_sleep() {
    let mut rig = TestTarget::new();
    let [one, other] = [1, 2].map(|number| rig.connect_host_with_io_queue(number).1);
    submit_fused_pair(&mut rig, one, 0, [&[0; 512], &[1; 512]]);
    rig.lines[one].poll_once(rig.now);
    rig.guests[one].poll_once(rig.now);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 1);
    rig.lines[other].submit(&read, DataDirection::ToHost(512), &[]);
    rig.lines[other].poll_once(rig.now);
    assert!(rig.guests[other].is_idle());
    rig.guests[other].poll_once(rig.now);
    assert!(!rig.guests[other].is_idle(), "a pair waits for its word");
    rig.guests[other].poll_once(rig.now);
    assert!(rig.guests[other].is_idle());
    rig.run_until_idle();
    disconnect_all_and_assert_empty(rig);
}
