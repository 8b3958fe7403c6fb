//! Processes that have a device open.

use super::DeviceUser;
use crate::kernel_files::KernelFiles;

/// Result of the search for processes that have devices open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Openers {
    /// Process and device of each open descriptor.
    pub found: Vec<DeviceUser>,
    /// Number of processes whose descriptors may not be read.
    pub hidden: usize,
}

/// Finds processes that have one of `nodes` open, each a path such as `/dev/nvme0n1`.
pub fn openers(machine: &KernelFiles, nodes: &[String]) -> Openers {
    let mut openers = Openers::default();
    let names = machine.names("proc");
    let mut processes: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    processes.sort_unstable();
    for process in processes.into_iter().filter(|process| *process != std::process::id()) {
        let directory = format!("proc/{process}");
        let Ok(descriptors) = std::fs::read_dir(machine.path(&format!("{directory}/fd"))) else {
            // A process that has exited meanwhile has nothing open.
            openers.hidden += usize::from(machine.has(&directory));
            continue;
        };
        let links = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let mut open: Vec<String> = links
            .filter_map(|link| link.into_os_string().into_string().ok())
            .filter(|link| nodes.contains(link))
            .collect();
        open.sort();
        open.dedup();
        let name = machine.text(&format!("{directory}/comm")).unwrap_or_default();
        openers.found.extend(open.into_iter().map(|node| DeviceUser::Open {
            device: node.strip_prefix("/dev/").unwrap_or(&node).to_owned(),
            process,
            name: name.clone(),
        }));
    }
    openers
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::openers;
    use crate::kernel_files::KernelFiles;
    use crate::kernel_files::tests::made_of;

    #[test]
    fn a_process_is_named_once_for_each_device_that_it_has_open() {
        let (root, machine) = made_of(&[
            ("proc/41/comm", "smartd\n"),
            ("proc/41/fd/x", ""),
            ("proc/7/comm", "other\n"),
            ("proc/7/fd/x", ""),
            ("proc/9/comm", "nobody may look\n"),
            ("proc/self/comm", "tenmil\n"),
        ]);
        for (link, node) in [
            ("41/fd/3", "/dev/nvme0n1"),
            ("41/fd/4", "/dev/nvme0n1"),
            ("41/fd/5", "/dev/nvme0"),
            ("7/fd/0", "/dev/nvme0n10"),
        ] {
            symlink(node, root.path().join("proc").join(link)).unwrap();
        }
        let found = openers(&machine, &["/dev/nvme0n1".into(), "/dev/nvme0".into()]);
        let said: Vec<String> = found.found.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            ["process 41 (smartd) has nvme0 open", "process 41 (smartd) has nvme0n1 open"]
        );
        assert_eq!(found.found[0].fix(), "`kill 41`");
        assert_eq!(found.hidden, 1);
    }

    #[test]
    fn nobody_on_this_machine_has_open_what_is_not_there() {
        assert_eq!(openers(&KernelFiles::live(), &["/dev/no such device".into()]).found, []);
    }
}
