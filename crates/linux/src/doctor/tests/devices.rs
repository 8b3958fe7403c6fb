//! SSDs and their device nodes.

use std::os::unix::fs::symlink;

use super::{checks_of_machine, probe_with_unsupported_queries};
use crate::CpuList;
use crate::doctor::{CheckSeverity, DoctorContext, run_checks};
use crate::kernel_files::tests::fake_kernel_files;

#[test]
fn ssds_are_reported_with_their_links() {
    let at = "sys/bus/pci/devices/0000:5e:00.0";
    let (root, machine) = fake_kernel_files(&[
        (&format!("{at}/class"), "0x010802\n"),
        (&format!("{at}/vendor"), "0x8086\n"),
        (&format!("{at}/device"), "0x0a54\n"),
        (&format!("{at}/nvme/nvme0/model"), "Disk 9\n"),
        (&format!("{at}/nvme/nvme0/state"), "dead\n"),
    ]);
    let line = |item: &str| {
        let all = checks_of_machine(&machine, &probe_with_unsupported_queries());
        all.iter().find(|finding| finding.item == item).unwrap().to_string()
    };
    assert!(line("0000:5e:00.0").contains("Disk 9, no driver"), "{}", line("0000:5e:00.0"));
    symlink("../../drivers/nvme", root.path().join(at).join("driver")).unwrap();
    assert!(line("0000:5e:00.0").starts_with("missing  0000:5e:00.0: Disk 9, driver nvme, its"));
    let link = "0000:5e:00.0 PCIe read request";
    assert!(line(link).contains("/config is not there"));
    let mut config = vec![0; 64];
    config[0x34] = 0x40;
    std::fs::write(root.path().join(at).join("config"), &config).unwrap();
    assert!(line(link).contains("shown to root only"));
    config.extend([0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0]);
    std::fs::write(root.path().join(at).join("config"), &config).unwrap();
    assert!(line(link).contains(": 256 bytes; recommended 512 bytes or more"), "{}", line(link));
    assert!(line(link).ends_with("fix: sudo setpci -s 0000:5e:00.0 CAP_EXP+8.w=2000:7000"));
}

#[test]
fn inaccessible_device_nodes_are_reported_with_the_command() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let (root, machine) = fake_kernel_files(&[("dev/vfio/vfio", ""), ("dev/vfio/12", "")]);
    let mode = |name: &str, mode: u32| {
        let path = root.path().join("dev/vfio").join(name);
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    };
    let owner = std::fs::metadata(root.path()).unwrap().uid();
    let found = |uid: u32| {
        let allowed = CpuList::parse("0").unwrap();
        let patient = DoctorContext {
            machine: &machine,
            kernel: &probe_with_unsupported_queries(),
            uid,
            allowed: &allowed,
        };
        let all = run_checks(&patient);
        all.into_iter().find(|finding| finding.item == "/dev/vfio").unwrap()
    };
    mode("vfio", 0o666);
    mode("12", 0o600);
    let other = owner + 7;
    let closed = found(other);
    assert_eq!(
        (closed.severity, closed.found),
        (CheckSeverity::Required, format!("user {other} may not open 12"))
    );
    let command = closed.fix.unwrap().command;
    assert!(command.starts_with(&format!("sudo chown {other} /dev/vfio/12")), "{command}");
    assert_eq!(found(owner).severity, CheckSeverity::Good);
    assert_eq!(found(0).found, "12, vfio");
    mode("vfio", 0o600);
    mode("12", 0o666);
    assert_eq!(found(other).fix.unwrap().command, "sudo chmod 0666 /dev/vfio/vfio");
    // Of a group to which the user belongs.
    mode("12", 0o660);
    mode("vfio", 0o666);
    assert_eq!(found(other).found, format!("user {other} may not open 12"));
    let group = std::fs::metadata(root.path().join("dev/vfio/12")).unwrap().gid();
    std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
    let status = format!("Gid:\t1\t1\t1\t1\nGroups:\t4 {group} \n");
    std::fs::write(root.path().join("proc/self/status"), status).unwrap();
    assert_eq!(found(other).severity, CheckSeverity::Good);
}
