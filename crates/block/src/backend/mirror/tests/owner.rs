//! What a mirror that was opened by its URI does while nobody does I/O.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use base::{Answers, Backend, Span};
use dma::Regions;
use host::Clock;

use crate::backend::mirror::channel::MirrorChannel;
use crate::backend::mirror::owner::Owner;
use crate::mirror::{Health, Leg, Mirror, MirrorEvent, MirrorOptions, create, hear_of_mirrors};
use crate::uri::Uri;
use crate::{Handle, Opener};

/// Longer than any of it takes.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_stale_leg_is_resynchronized_and_announced_while_nobody_does_io() {
    let directory = tempfile::tempdir().unwrap();
    let regions = Regions::new(200);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, more: &[] };
    let leg = |name: &str, query: &str| -> String {
        let path = directory.path().join(name);
        format!("file:{}?engine=threads{query}", path.display())
    };
    let uris = ["a", "b"].map(|name| leg(name, "&size=4m").parse::<Uri>().unwrap());
    create(&opener, &uris, false).unwrap();
    let open = |text: String| opener.open(&text.parse().unwrap()).unwrap();
    let (sender, heard) = mpsc::channel();
    let mine = directory.path().display().to_string();
    hear_of_mirrors(move |news| {
        if news.device.contains(&mine) {
            // After the test nobody listens.
            let _ = sender.send((news.event, news.to_string()));
        }
    });
    let expect = |event: MirrorEvent, text: &str| loop {
        let (found, said) = heard.recv_timeout(PATIENCE).unwrap();
        if found == event {
            assert!(said.contains(text), "{said}");
            return;
        }
    };
    let alone = open(format!("mirror:[{}]?degraded=yes", leg("a", "")));
    expect(MirrorEvent::Degraded { leg: 1 }, "leg 1 (absent) is not in sync; 1 of 2 legs in sync");
    drop(alone);
    let both = open(format!("mirror:[{}],[{}]", leg("a", ""), leg("b", "")));
    expect(MirrorEvent::LegReturned { leg: 1 }, "/b?engine=threads) answers again");
    expect(MirrorEvent::LegInSync { leg: 1 }, "2 of 2 legs in sync, healthy");
    let Some(Handle::Mirror { handle, .. }) = both.handles.last() else { panic!("no handle") };
    let progress = handle.progress().unwrap();
    assert_eq!((progress.health, progress.counters.legs_resynchronized), (Health::Healthy, 1));
    drop(both);
}

#[test]
fn copying_goes_on_when_a_client_asks_nothing_more_and_is_not_polled() {
    let directory = tempfile::tempdir().unwrap();
    let (regions, clock) = (Regions::new(200), Clock::start());
    let opener = Opener { regions: &regions, clock, seed: 1, more: &[] };
    let uris = ["a", "b"].map(|name| {
        let path = directory.path().join(name);
        let made = std::fs::File::options().write(true).create_new(true).open(&path);
        made.unwrap().write_all(&[7; 9 << 20]).unwrap();
        format!("file:{}?engine=threads&size=9m", path.display()).parse::<Uri>().unwrap()
    });
    create(&opener, &uris, true).unwrap();
    let legs = uris.map(|uri| {
        let medium = opener.open(&uri).map(|opened| opened.medium);
        Leg { name: uri.to_string(), medium: medium.map_err(|error| error.to_string()) }
    });
    let options = MirrorOptions::default();
    let mirror = Mirror::open(&regions, &legs, &options, &mut || clock.now()).unwrap();
    let mut client = MirrorChannel::open(&mirror.shared).unwrap();
    let owner = Owner::start(&mirror.shared, "a mirror".into(), &mirror.names, clock).unwrap();
    let left = || mirror.progress().1;
    assert!(owner.is_some() && left() > 0);
    let mut nothing = Answers::with_capacity(8);
    while left() > 0 && !client.is_tending() {
        assert_eq!(client.poll(clock.now(), &mut nothing), 0);
    }
    let begun = clock.now();
    while left() > 0 {
        let waited = clock.now().since(begun);
        assert!(waited < Span::from_secs(10), "{} regions are left after {waited}", left());
        host::thread::give_way();
    }
}
