//! What a mirror that was opened by its URI does while nobody does I/O.

use std::sync::mpsc;
use std::time::Duration;

use dma::Regions;
use host::Clock;

use crate::mirror::{Health, MirrorEvent, create, hear_of_mirrors};
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
