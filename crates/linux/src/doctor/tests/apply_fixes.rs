//! Changes that are made, and settings that are left alone.

use std::cell::RefCell;

use super::{FakeProbe, SLOW, checks_of_machine, probe_with_unsupported_queries};
use crate::Errno;
use crate::doctor::{SysfsChange, apply_safe_changes};
use crate::frequency_control::CpufreqFiles;
use crate::kernel_files::tests::fake_kernel_files;

#[test]
fn only_safe_changes_are_applied_and_each_has_an_undo_command() {
    let (_root, machine) = fake_kernel_files(SLOW);
    let refused = FakeProbe { io_uring: Err("EPERM".into()), ..probe_with_unsupported_queries() };
    let applied = apply_safe_changes(&machine, &checks_of_machine(&machine, &refused));
    let said: Vec<(&str, String)> =
        applied.iter().map(|one| (one.change.path.as_str(), one.change.undo_command())).collect();
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
    assert_eq!(machine.read_number("proc/sys/net/core/rmem_max"), Some(268_435_456));
    for (untouched, value) in [
        ("proc/sys/vm/nr_hugepages", "0"),
        ("sys/fs/cgroup/box/cpu.max", "150000 100000"),
        ("proc/sys/kernel/io_uring_disabled", "2"),
    ] {
        assert_eq!(machine.read_trimmed(untouched).as_deref(), Some(value), "{untouched}");
    }
}

#[test]
fn checks_change_nothing() {
    let (_root, machine) = fake_kernel_files(SLOW);
    checks_of_machine(&machine, &probe_with_unsupported_queries());
    for (path, text) in SLOW {
        assert_eq!(machine.read_trimmed(path).as_deref(), Some(text.trim()), "{path}");
    }
}

/// A kernel that refuses a value, or stores another one.
struct FilesRejectingOrAlteringWrites(Result<(), Errno>, RefCell<u32>);

impl CpufreqFiles for FilesRejectingOrAlteringWrites {
    fn read_trimmed(&self, _: &str) -> Option<String> {
        Some("212992".into())
    }

    fn write_value(&self, _: &str, _: &str) -> Result<(), Errno> {
        *self.1.borrow_mut() += 1;
        self.0
    }
}

#[test]
fn change_that_has_no_effect_is_reported() {
    let (_root, machine) = fake_kernel_files(&[("proc/sys/net/core/rmem_max", "212992\n")]);
    let findings = checks_of_machine(&machine, &probe_with_unsupported_queries());
    for (answer, expected) in [
        (Err(Errno::ACCESS), "permission denied, expected to run as root"),
        (Ok(()), "the kernel has made `212992` of it"),
    ] {
        let stubborn = FilesRejectingOrAlteringWrites(answer, RefCell::default());
        let applied = apply_safe_changes(&stubborn, &findings);
        assert_eq!(applied.len(), 1);
        assert_eq!(applied[0].result, Err(expected.to_owned()));
        assert_eq!(*stubborn.1.borrow(), 1);
    }
    let change = SysfsChange { path: "a".into(), from: "1 2".into(), to: "3".into() };
    assert_eq!(change.undo_command(), "echo '1 2' | sudo tee /a");
}
