//! Who is admitted while others have many connections.

use base::Span;
use wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData};
use wire::layout::Ascii;
use wire::{Status, nqn};

use super::rig::{Rig, admin_config, admin_connect, connect_data, limits};
use crate::tcp::{AdmissionLimits, Limits, News, Reason};

fn discovery() -> ConnectData {
    connect_data(CNTLID_DYNAMIC).with(|data| data.subnqn(Ascii::nul_padded(nqn::DISCOVERY)))
}

fn connect(rig: &mut Rig, connect: &Connect, data: &ConnectData) -> Status {
    let line = rig.dial(admin_config());
    rig.connect(line, connect, data).status()
}

#[test]
fn idle_discovery_connections_lock_nobody_out() {
    let limits = Limits { connections_max: 40, memory_bytes: 32 << 20, ..limits() };
    let mut rig = Rig::with(limits, |plan| plan);
    let asked = Connect { kato: 600_000, ..admin_connect() };
    for count in 0..30 {
        let expected = if count < 10 { Status::SUCCESS } else { Status::CONNECT_CONTROLLER_BUSY };
        assert_eq!(connect(&mut rig, &asked, &discovery()), expected, "{count}");
    }
    assert_eq!(rig.service.refused(), 20);
    let told = |news: &News| matches!(news, News::Refused { why, .. } if why.contains("discovery"));
    assert_eq!(rig.news.iter().filter(|news| told(news)).count(), 20);
    rig.admin();
    // Who was refused and does not go is sent away, and idle ones are in their time.
    rig.pass(Span::from_secs(11));
    assert_eq!(rig.service.connected(), 11);
    rig.pass(Span::from_secs(600));
    rig.pass(Span::from_secs(600));
    let expired = Reason::KeepAliveExpired;
    let is_it =
        |news: &&News| matches!(news, News::Disconnected { reason, .. } if *reason == expired);
    assert_eq!(rig.news.iter().filter(is_it).count(), 10);
}

#[test]
fn a_keep_alive_time_out_has_a_bound() {
    let mut rig = Rig::new();
    for (kato, expected) in [
        (600_000, Status::SUCCESS),
        (600_001, Status::CONNECT_INVALID_PARAMETERS.with_dnr()),
        (u32::MAX, Status::CONNECT_INVALID_PARAMETERS.with_dnr()),
    ] {
        for data in [discovery(), connect_data(CNTLID_DYNAMIC)] {
            let asked = Connect { kato, ..admin_connect() };
            assert_eq!(connect(&mut rig, &asked, &data), expected, "{kato}");
        }
    }
}

#[test]
fn one_host_does_not_take_all_connections() {
    let admission = Some(AdmissionLimits { per_host_max: 2, ..AdmissionLimits::of(16) });
    let mut rig = Rig::with(Limits { admission, ..limits() }, |plan| plan);
    let (_, cntlid) = rig.admin();
    rig.io(cntlid, 1);
    let mine = connect_data(CNTLID_DYNAMIC);
    assert_eq!(connect(&mut rig, &admin_connect(), &mine), Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(rig.service.associations(), 1, "what was refused is not kept");
    let name = Ascii::nul_padded("nqn.2014-08.org.example:other");
    let other = connect_data(CNTLID_DYNAMIC).with(|data| data.hostnqn(name).hostid([9; 16]));
    assert_eq!(connect(&mut rig, &admin_connect(), &other), Status::SUCCESS);
    // With a connection that goes there is room for another.
    rig.lines[1].pipe = None;
    rig.run();
    rig.io(cntlid, 1);
}
