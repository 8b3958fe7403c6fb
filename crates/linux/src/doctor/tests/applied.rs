//! Changes that are made, and settings that are left alone.

use std::cell::RefCell;

use super::{SLOW, Told, look, silent};
use crate::Errno;
use crate::doctor::{SysfsChange, apply};
use crate::frequency::CpufreqFiles;
use crate::kernel_files::tests::made_of;

#[test]
fn only_what_is_safe_is_applied_and_each_change_says_how_it_is_undone() {
    let (_root, machine) = made_of(SLOW);
    let refused = Told { io_uring: Err("EPERM".into()), ..silent() };
    let applied = apply(&machine, &look(&machine, &refused));
    let said: Vec<(&str, String)> =
        applied.iter().map(|one| (one.change.path.as_str(), one.change.undo())).collect();
    assert_eq!(
        said,
        [
            (
                "sys/kernel/mm/transparent_hugepage/enabled",
                "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/enabled".to_owned()
            ),
            (
                "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor",
                "echo powersave | sudo tee /sys/devices/system/cpu/cpu1/cpufreq/scaling_governor"
                    .to_owned()
            ),
            (
                "proc/sys/net/core/rmem_max",
                "echo 212992 | sudo tee /proc/sys/net/core/rmem_max".to_owned()
            ),
            (
                "proc/sys/net/ipv4/tcp_rmem",
                "echo '4096 131072 6291456' | sudo tee /proc/sys/net/ipv4/tcp_rmem".to_owned()
            ),
        ]
    );
    assert!(applied.iter().all(|one| one.result.is_ok()), "{applied:?}");
    assert_eq!(machine.number("proc/sys/net/core/rmem_max"), Some(268_435_456));
    for (untouched, value) in [
        ("proc/sys/vm/nr_hugepages", "0"),
        ("sys/fs/cgroup/box/cpu.max", "150000 100000"),
        ("proc/sys/kernel/io_uring_disabled", "2"),
    ] {
        assert_eq!(machine.text(untouched).as_deref(), Some(value), "{untouched}");
    }
}

#[test]
fn a_look_changes_nothing() {
    let (_root, machine) = made_of(SLOW);
    look(&machine, &silent());
    for (path, text) in SLOW {
        assert_eq!(machine.text(path).as_deref(), Some(text.trim()), "{path}");
    }
}

/// A kernel that refuses a value, or stores another one.
struct Stubborn(Result<(), Errno>, RefCell<u32>);

impl CpufreqFiles for Stubborn {
    fn text(&self, _: &str) -> Option<String> {
        Some("212992".into())
    }

    fn write(&self, _: &str, _: &str) -> Result<(), Errno> {
        *self.1.borrow_mut() += 1;
        self.0
    }
}

#[test]
fn a_change_that_the_kernel_does_not_make_is_told() {
    let (_root, machine) = made_of(&[("proc/sys/net/core/rmem_max", "212992\n")]);
    let findings = look(&machine, &silent());
    for (answer, expected) in [
        (Err(Errno::ACCESS), "permission denied, expected to run as root"),
        (Ok(()), "the kernel has made `212992` of it"),
    ] {
        let stubborn = Stubborn(answer, RefCell::default());
        let applied = apply(&stubborn, &findings);
        assert_eq!(applied.len(), 1);
        assert_eq!(applied[0].result, Err(expected.to_owned()));
        assert_eq!(*stubborn.1.borrow(), 1);
    }
    let change = SysfsChange { path: "a".into(), from: "1 2".into(), to: "3".into() };
    assert_eq!(change.undo(), "echo '1 2' | sudo tee /a");
}
