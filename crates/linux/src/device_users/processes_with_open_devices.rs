//! Processes that have a device open.

use super::DeviceUser;
use crate::kernel_files::KernelFiles;

/// Result of the search for processes that have devices open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessesWithOpenDevices {
    /// Process and device of each open descriptor.
    pub found: Vec<DeviceUser>,
    /// Number of processes whose descriptors may not be read.
    pub hidden: usize,
}

/// Finds processes that have one of `nodes` open, each a path such as `/dev/nvme0n1`.
pub fn find_processes_with_open_devices(
    machine: &KernelFiles,
    nodes: &[String],
) -> ProcessesWithOpenDevices {
    let mut openers = ProcessesWithOpenDevices::default();
    let names = machine.directory_entries("proc");
    let mut processes: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    processes.sort_unstable();
    for process in processes.into_iter().filter(|process| *process != std::process::id()) {
        let directory = format!("proc/{process}");
        let Ok(descriptors) = std::fs::read_dir(machine.path_of(&format!("{directory}/fd"))) else {
            // A process that has exited meanwhile has nothing open.
            openers.hidden += usize::from(machine.exists(&directory));
            continue;
        };
        let links = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let mut open: Vec<String> = links
            .filter_map(|link| link.into_os_string().into_string().ok())
            .filter(|link| nodes.contains(link))
            .collect();
        open.sort_unstable();
        open.dedup();
        let name = machine.read_trimmed(&format!("{directory}/comm")).unwrap_or_default();
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

    use super::find_processes_with_open_devices;
    use crate::kernel_files::KernelFiles;
    use crate::kernel_files::tests::fake_kernel_files;

    #[test]
    fn process_is_listed_once_per_open_device() {
        let (root, machine) = fake_kernel_files(&[
            ("proc/41/comm", "smartd\n"),
            ("proc/41/fd/x", ""),
            ("proc/7/comm", "other\n"),
            ("proc/7/fd/x", ""),
            ("proc/9/comm", "hidden\n"),
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
        let found = find_processes_with_open_devices(
            &machine,
            &["/dev/nvme0n1".into(), "/dev/nvme0".into()],
        );
        let said: Vec<String> = found.found.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            ["process 41 (smartd) has nvme0 open", "process 41 (smartd) has nvme0n1 open"]
        );
        assert_eq!(found.found[0].release_command(), "`kill 41`");
        assert_eq!(found.hidden, 1);
    }

    #[test]
    fn missing_device_is_open_nowhere() {
        assert_eq!(
            find_processes_with_open_devices(
                &KernelFiles::live_system(),
                &["/dev/no such device".into()]
            )
            .found,
            []
        );
    }
}
