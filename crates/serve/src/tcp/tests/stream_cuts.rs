//! A connection cut at any byte releases everything and disturbs no other connection.

use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status};

use super::test_target::{TestTarget, pattern, read_or_write_command};

/// Writes, reads and an event request on two connections, until one of them is cut.
fn run_io_and_event_request(rig: &mut TestTarget, admin: usize, io: usize) {
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    rig.lines[admin].submit(&event, DataDirection::None, &[]);
    rig.lines[admin].submit(&identify, DataDirection::ToHost(4096), &[]);
    for (number, blocks) in [(1_u32, 1_u32), (2, 24), (3, 8)] {
        let len = blocks * 512;
        let bytes = pattern(number, len as usize);
        let write = read_or_write_command(IoOpcode::Write.code(), 100, blocks);
        rig.lines[io].submit(&write, DataDirection::FromHost(len), &bytes);
        let read = read_or_write_command(IoOpcode::Read.code(), 200, blocks);
        rig.lines[io].submit(&read, DataDirection::ToHost(len), &[]);
    }
    rig.run_until_idle();
}

/// Cuts the pipe of a connection at every `step`th byte that it sends or receives, with a second
/// host connected. Returns the number of bytes.
fn cut_at_every_step(is_admin: bool, is_upwards: bool, step: usize) -> usize {
    let mut at = 0;
    loop {
        let mut rig = TestTarget::new();
        let (_, other) = rig.connect_admin_queue();
        let bystander = rig.connect_io_queue(other, 1);
        let (admin, cntlid) = rig.connect_admin_queue();
        let io = rig.connect_io_queue(cntlid, 1);
        let victim = if is_admin { admin } else { io };
        let before = rig.lines[victim].bytes_transferred(is_upwards);
        rig.lines[victim].allowance = Some((is_upwards, before + at));
        run_io_and_event_request(&mut rig, admin, io);
        let is_whole = rig.lines[victim].pipe.is_some();
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
        let (completion, _) =
            rig.execute_command(bystander, &read, DataDirection::ToHost(4096), &[]);
        assert_eq!(completion.status(), Status::SUCCESS, "cut at {at}");
        if is_admin && !is_whole {
            assert_eq!(
                rig.service.association_count(),
                1,
                "cut at {at}: its association has ended"
            );
            assert_eq!(rig.guests.len(), 2, "cut at {at}");
        }
        rig.lines.clear();
        rig.assert_all_released();
        if is_whole {
            return at;
        }
        at += step;
    }
}

#[test]
fn stream_cut_at_any_received_byte_leaks_nothing() {
    // Three writes with in-capsule data, and their capsules.
    assert!(cut_at_every_step(false, true, 37) > 16 << 10);
    assert!(cut_at_every_step(true, true, 1) >= 144);
}

#[test]
fn stream_cut_at_any_sent_byte_leaks_nothing() {
    assert!(cut_at_every_step(false, false, 37) > 16 << 10);
    assert!(cut_at_every_step(true, false, 13) >= 4096);
}

#[test]
#[ignore = "takes minutes: .ci/nightly runs it"]
fn stream_cut_at_every_byte_leaks_nothing() {
    let all = [(false, true), (false, false), (true, false)];
    let cuts = all.map(|(is_admin, is_upwards)| cut_at_every_step(is_admin, is_upwards, 1));
    assert!(cuts.iter().all(|count| *count >= 4096), "{cuts:?}");
}

/// Cuts ICReq and Connect at every byte.
#[test]
fn stream_cut_before_connect_leaks_nothing() {
    use super::test_target::{admin_config, admin_connect, connect_data};
    use tenmil_wire::TypedCommand;
    use tenmil_wire::fabrics::CNTLID_DYNAMIC;
    for at in 0..128 + 72 + 1024 {
        let mut rig = TestTarget::new();
        rig.allowance = Some((true, at));
        let line = rig.open_connection(admin_config());
        let bytes = connect_data(CNTLID_DYNAMIC);
        if rig.lines[line].terms.is_some() {
            let connect = admin_connect().to_command();
            rig.lines[line].submit(&connect, DataDirection::FromHost(1024), bytes.as_bytes());
        }
        rig.run_until_idle();
        assert_eq!(rig.guests.len(), 0, "cut at {at}");
        rig.lines.clear();
        rig.assert_all_released();
    }
}
