//! Legs of one device share an `io_uring`. Alone in its process, since it counts those of the
//! process.

#![expect(clippy::unwrap_used, reason = "a test may")]

use tenmil_block::Opener;
use tenmil_dma::RegionTable;
use tenmil_drivers::mirror::create_mirror;
use tenmil_linux::Clock;

fn ring_count() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = links.filter_map(|one| std::fs::read_link(one.path()).ok());
    links.filter(|link| link.as_os_str() == "anon_inode:[io_uring]").count()
}

/// Whether the memory of some rings may be locked: CAP_IPC_LOCK, or a large limit.
fn may_lock_memory() -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory")).unwrap();
    let limit = limit.split_whitespace().next().unwrap().parse().unwrap_or(u64::MAX);
    u64::from_str_radix(effective.trim(), 16).unwrap() & CAP_IPC_LOCK != 0 || limit >= 1 << 20
}

#[test]
fn channel_over_two_files_has_one_ring() {
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(64);
    let opener = Opener {
        regions: &regions,
        clock: Clock::on_kernel_clock(),
        seed: 1,
        kinds: tenmil_drivers::KINDS,
    };
    let file = |name: &str| {
        let path = directory.path().join(name);
        format!("file:{}?size=9m&block=4k&engine=io_uring", path.display())
    };
    let legs = [file("a"), file("b")].map(|uri| uri.parse().unwrap());
    if let Err(error) = opener.open(&legs[0]) {
        return println!("skipped: {error}");
    }
    if !may_lock_memory() {
        return println!("skipped: the user may lock too little memory for the rings");
    }
    create_mirror(&opener, &legs, true).unwrap();
    let stripe = format!("stripe:[{}],[{}]?chunk=4k", file("c"), file("d"));
    let pair = format!("mirror:[{}],[{}]", legs[0], legs[1]);
    for (uri, owner) in [(stripe, 0), (pair, 1)] {
        let before = ring_count();
        let opened = opener.open(&uri.parse().unwrap()).unwrap();
        // The maintenance thread of a mirror has a channel of its own.
        assert_eq!(ring_count() - before, owner, "{uri}");
        let channels = [(); 2].map(|()| opened.medium.channel().unwrap());
        assert_eq!(ring_count() - before, owner + 2, "{uri}: one for each channel");
        drop(channels);
        assert_eq!(ring_count() - before, owner, "{uri}");
    }
}
