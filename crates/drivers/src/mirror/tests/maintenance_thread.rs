//! Background work of a mirror that was opened by its URI, without I/O.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use tenmil_base::{CompletionBatch, IoChannel, Span};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::mirror::maintenance_thread::MaintenanceThread;
use crate::mirror::mirror_channel::MirrorChannel;
use crate::mirror::{
    Health, Mirror, MirrorEvent, MirrorLegDevice, MirrorMonitor, MirrorOptions, create_mirror,
    subscribe_mirror_events,
};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;

/// Longer than any of the background work takes.
const TIME_LIMIT: Duration = Duration::from_secs(60);

#[test]
fn stale_leg_is_resynchronized_without_client_io() {
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(200);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: crate::KINDS };
    let leg = |name: &str, query: &str| -> String {
        let path = directory.path().join(name);
        format!("file:{}?engine=threads{query}", path.display())
    };
    let uris = ["a", "b"].map(|name| leg(name, "&size=4m").parse::<Uri>().unwrap());
    create_mirror(&opener, &uris, false).unwrap();
    let open = |text: String| opener.open(&text.parse().unwrap()).unwrap();
    let (sender, heard) = mpsc::channel();
    let mine = directory.path().display().to_string();
    subscribe_mirror_events(move |new_events| {
        if new_events.device.contains(&mine) {
            // After the test, the receiver is gone.
            let _ = sender.send((new_events.event, new_events.to_string()));
        }
    });
    let expect = |event: MirrorEvent, text: &str| loop {
        let (found, said) = heard.recv_timeout(TIME_LIMIT).unwrap();
        if found == event {
            assert!(said.contains(text), "{said}");
            return;
        }
    };
    let alone = open(format!("mirror:[{}]?degraded=yes", leg("a", "")));
    expect(MirrorEvent::Degraded { leg: 1 }, "leg 1 (absent) is not in sync; 1 of 2 legs in sync");
    drop(alone);
    let both = open(format!("mirror:[{}],[{}]", leg("a", ""), leg("b", "")));
    expect(MirrorEvent::LegReturned { leg: 1 }, "/b?engine=threads) responds again");
    expect(MirrorEvent::LegInSync { leg: 1 }, "2 of 2 legs in sync, healthy");
    let handle = both.handles.last().unwrap().downcast::<MirrorMonitor>().unwrap();
    let progress = handle.progress().unwrap();
    assert_eq!((progress.health, progress.counters.legs_resynchronized), (Health::Healthy, 1));
    drop(both);
}

#[test]
fn resync_continues_while_clients_are_idle() {
    let directory = tempfile::tempdir().unwrap();
    let (regions, clock) = (RegionTable::new(200), Clock::start());
    let opener = Opener { regions: &regions, clock, seed: 1, kinds: crate::KINDS };
    let uris = ["a", "b"].map(|name| {
        let path = directory.path().join(name);
        let made = std::fs::File::options().write(true).create_new(true).open(&path);
        made.unwrap().write_all(&[7; 9 << 20]).unwrap();
        format!("file:{}?engine=threads&size=9m", path.display()).parse::<Uri>().unwrap()
    });
    create_mirror(&opener, &uris, true).unwrap();
    let legs = uris.map(|uri| {
        let medium = opener.open(&uri).map(|opened| opened.medium);
        MirrorLegDevice {
            name: uri.to_string(),
            medium: medium.map_err(tenmil_base::Error::environment),
        }
    });
    let options = MirrorOptions::default();
    let mirror = Mirror::open(&regions, &legs, &options, &mut || clock.now()).unwrap();
    let mut client = MirrorChannel::open(&mirror.shared).unwrap();
    let owner =
        MaintenanceThread::start(&mirror.shared, "a mirror".into(), &mirror.names, clock).unwrap();
    let left = || mirror.in_sync_mask_and_remaining_regions().1;
    assert!(owner.is_some() && left() > 0);
    let mut nothing = CompletionBatch::with_capacity(8);
    while left() > 0 && !client.is_maintenance_running() {
        assert_eq!(client.poll(clock.now(), &mut nothing), 0);
    }
    let begun = clock.now();
    while left() > 0 {
        let waited = clock.now().since(begun);
        assert!(waited < Span::from_secs(10), "{} regions are left after {waited}", left());
        tenmil_linux::named_thread::yield_cpu();
    }
}
