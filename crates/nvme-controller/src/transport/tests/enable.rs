//! Registers from the outside, as seen by a driver that enables and disables the controller.

use tenmil_base::{Doorbell, Mmio};
use tenmil_wire::register::Capabilities;

use super::fixture::{ACQ, AQA, ASQ, CAP, CC, CSTS, ENABLED, LATER, SHARED, TransportFixture};
use crate::transport::{HostBarHandle, NextPoll};

const RDY: u64 = 1;
const CFS: u64 = 1 << 1;

#[test]
fn cap_register_matches_the_controller() {
    let rig = TransportFixture::new(SHARED, |device| device);
    let cap = Capabilities(rig.front.read_register(CAP, 8));
    assert_eq!((cap.entries_max(), cap.dstrd(), cap.to()), (64, 3, 20));
    assert!(cap.cqr() && cap.nssrs() && cap.css_nvm() && cap.css_io() && cap.crwms());
    assert!(!cap.cmbs() && !cap.pmrs() && !cap.bps() && !cap.ams_weighted());
    assert_eq!((cap.page_bytes_min(), cap.page_bytes_max()), (4096, 65536));
    assert_eq!(rig.read_register(0x68), 20, "CRTO agrees with CAP.TO");
    assert_eq!(rig.read_register(0x08), 0x0002_0100);
}

#[test]
fn csts_rdy_follows_cc_en_within_one_poll() {
    for behavior in [SHARED, LATER] {
        let mut rig = TransportFixture::new(behavior, |device| device);
        for _ in 0..3 {
            rig.enable_controller(16);
            assert_eq!(rig.read_register(CSTS), RDY);
            rig.write_register(CC, 0);
            assert_eq!(rig.read_register(CSTS), RDY, "nothing happens before the next turn");
            rig.poll_transport();
            assert_eq!(rig.read_register(CSTS), 0);
            assert_eq!(
                rig.read_register(AQA),
                0x000f_000f,
                "a controller reset keeps the admin queue"
            );
        }
    }
}

#[test]
fn invalid_configuration_sets_csts_cfs_until_disabled() {
    let wrong = [
        ("no room in the submission queue", 0x000f_0000, ENABLED, 0x1000),
        ("no room in the completion queue", 0x0000_000f, ENABLED, 0x1000),
        ("pages too large", 0x000f_000f, ENABLED | 5 << 7, 0x1000),
        ("an unknown command set", 0x000f_000f, ENABLED | 1 << 4, 0x1000),
        ("weighted round robin", 0x000f_000f, ENABLED | 1 << 11, 0x1000),
        ("a queue nowhere", 0x000f_000f, ENABLED, 1 << 40),
    ];
    for (what, aqa, cc, asq) in wrong {
        let mut rig = TransportFixture::new(SHARED, |device| device);
        rig.write_register(AQA, aqa);
        rig.front.write_register(rig.now, ASQ, 8, asq);
        rig.front.write_register(rig.now, ACQ, 8, 0x2000);
        rig.write_register(CC, cc.into());
        rig.poll_transport();
        assert_ne!(rig.read_register(CSTS) & CFS, 0, "{what}");
        assert!(rig.front.last_error().is_some_and(|why| why.starts_with("enable: ")), "{what}");
        rig.write_register(CC, 0);
        rig.poll_transport();
        assert_eq!(rig.read_register(CSTS), 0, "{what}");
        rig.enable_controller(16);
    }
}

#[test]
fn larger_pages_and_command_sets_are_accepted_in_cc() {
    for cc in [ENABLED | 4 << 7, ENABLED | 6 << 4, ENABLED | 7 << 4] {
        let mut rig = TransportFixture::new_enabled(SHARED);
        rig.write_register(CC, 0);
        rig.poll_transport();
        rig.write_register(CC, cc.into());
        rig.poll_transport();
        assert_eq!(rig.read_register(CSTS), RDY, "{cc:x}");
    }
}

#[test]
fn host_in_the_same_process_uses_shared_registers() {
    let mut rig = TransportFixture::new(SHARED, |device| device);
    let mut bar = HostBarHandle::new(rig.front.bar_registers().clone(), ());
    bar.write32(AQA, 0x000f_000f);
    bar.write64(ASQ, 0x1000);
    bar.write64(ACQ, 0x2000);
    bar.write32(CC, ENABLED);
    assert_eq!(bar.read32(CSTS), 0);
    assert_eq!(rig.poll_transport(), NextPoll::Busy);
    assert_eq!(bar.read32(CSTS), 1);
    let identify = tenmil_wire::Command::new(6).with_prp(0x4_0000, 0).with_cdw10(1);
    rig.write_host_memory(0x1000, &identify.to_bytes());
    let stride = Capabilities(bar.read64(CAP)).doorbell_stride_bytes();
    bar.doorbell(0x1000).ring(1);
    rig.poll_transport();
    assert_eq!(rig.read_host_memory(0x2000 + 14, 2), [1, 0], "phase, and no error");
    assert_eq!(rig.read_host_memory(0x4_0000 + 4, 4), b"TEST", "the serial number");
    bar.doorbell(0x1000 + u32::try_from(stride).unwrap()).ring(1);
    rig.poll_transport();
    assert!(matches!(rig.poll_transport(), NextPoll::Idle(_)));
}

#[test]
fn subsystem_reset_sets_nssro() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.write_register(0x20, 0x4e56_4d65);
    rig.poll_transport();
    assert_eq!(rig.read_register(CSTS), 1 << 4, "NSSRO");
    assert_eq!(
        (rig.read_register(CC), rig.read_register(AQA), rig.front.read_register(ASQ, 8)),
        (0, 0, 0)
    );
    rig.write_register(CSTS, 1 << 4);
    rig.poll_transport();
    rig.enable_controller(16);
}

#[test]
fn commands_on_any_queue_restart_keep_alive() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    let set = tenmil_wire::admin::SetFeatures { fid: 0x0f, cdw11: 500, ..Default::default() };
    assert!(rig.run_admin(tenmil_wire::TypedCommand::to_command(&set)).status().is_success());
    for _ in 0..20 {
        rig.now = rig.now.after(tenmil_base::Span::from_ms(300));
        assert!(rig.run_command(1, super::fixture::read_command(1)).status().is_success());
        rig.poll_transport();
    }
    assert_eq!(rig.read_register(CSTS), RDY);
}

#[test]
fn keep_alive_timeout_sets_csts_cfs() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    let set = tenmil_wire::admin::SetFeatures { fid: 0x0f, cdw11: 500, ..Default::default() };
    let set = tenmil_wire::TypedCommand::to_command(&set);
    assert!(rig.run_admin(set).status().is_success());
    rig.now = rig.now.after(tenmil_base::Span::from_secs(2));
    rig.poll_until("the time-out", |rig| rig.read_register(CSTS) & CFS != 0);
    let trouble = rig.front.last_error().unwrap_or_default().to_owned();
    assert!(trouble.contains("keep-alive timeout"), "{trouble}");
    rig.write_register(CC, 0);
    rig.poll_transport();
    assert_eq!(rig.read_register(CSTS), 0);
}
