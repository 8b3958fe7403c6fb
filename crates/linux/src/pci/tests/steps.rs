//! Steps and their results.

use super::fake_kernel::FakeKernel;
use super::test_tree::{
    FUNCTION, SECOND, TestTree, disk_signatures, function_sysfs_path, test_address,
};
use crate::Errno;
use crate::device_users::ProcessesWithOpenDevices;
use crate::pci::{
    BindError, BindRequest, BoundDevice, NvmeFunction, UnbindSelection, bind_functions,
    functions_bound_by_tenmil, plan_bind, plan_unbind, unbind_functions,
};

fn bind_request(owner: Option<u32>, no_iommu: bool) -> BindRequest<'static> {
    BindRequest { owner, no_iommu, even_if_in_use: &[], signatures: &disk_signatures }
}

fn bind_addresses(
    kernel: &FakeKernel<'_>,
    at: &[&str],
    terms: &BindRequest<'_>,
) -> Result<Vec<BoundDevice>, BindError> {
    bind_functions(kernel, &at.iter().map(|at| test_address(at)).collect::<Vec<_>>(), terms)
}

#[test]
fn steps_are_shown_as_shell_commands() {
    let tree = TestTree::with_functions("");
    let kernel = FakeKernel::new(&tree);
    let verdicts =
        plan_bind(&kernel, &[test_address(FUNCTION)], &bind_request(Some(1000), false)).unwrap();
    let shown: Vec<String> =
        verdicts[0].steps.iter().map(|step| step.shell_command(verdicts[0].address)).collect();
    assert_eq!(
        shown,
        [
            "record in /run/tenmil that the driver was nvme",
            "echo 'vfio-pci' > /sys/bus/pci/devices/0000:5e:00.0/driver_override",
            "echo 0000:5e:00.0 > /sys/bus/pci/drivers/nvme/unbind",
            "echo 0000:5e:00.0 > /sys/bus/pci/drivers_probe",
            "chown 1000 its device nodes in /dev/vfio",
        ]
    );
}

#[test]
fn function_is_bound_and_unbound() {
    let tree = TestTree::with_functions("override nvme");
    let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
    let done = bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), false)).unwrap();
    assert_eq!((done[0].original_driver.as_deref(), done[0].is_new), (Some("nvme"), true));
    assert_eq!(*kernel.given.borrow(), [("dev/vfio/12".to_owned(), 1000)]);
    let function = NvmeFunction::at_address(&tree.machine, test_address(FUNCTION)).unwrap();
    assert_eq!(function.driver.as_deref(), Some("vfio-pci"));
    assert_eq!((function.model(), function.disks), ("8086:0a54".into(), vec![]));
    assert_eq!(functions_bound_by_tenmil(&tree.machine), [test_address(FUNCTION)]);

    for owner in [None, Some(1000)] {
        let again = bind_addresses(&kernel, &[FUNCTION], &bind_request(owner, false)).unwrap();
        assert!(!again[0].is_new && again[0].original_driver.as_deref() == Some("nvme"));
    }

    let (back, error) = unbind_functions(&kernel, &UnbindSelection::All);
    assert_eq!((back, error), (vec![test_address(FUNCTION)], Ok(())));
    let after = tree.driver_state();
    assert_eq!(after, before);
    assert_eq!(
        unbind_functions(&kernel, &UnbindSelection::All),
        (vec![], Ok(())),
        "there is nothing left to do"
    );
}

#[test]
fn per_device_vfio_node_is_chowned_if_present() {
    let tree = TestTree::with_functions("");
    tree.write_file("dev/vfio/devices/vfio0", "");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), false)).unwrap();
    let given = ["dev/vfio/12", "dev/vfio/devices/vfio0"].map(|node| (node.to_owned(), 1000));
    assert_eq!(*kernel.given.borrow(), given);
}

#[test]
fn functions_are_bound_all_or_none() {
    let tree = TestTree::with_functions("second-function 13; mount nvme1n1 /b");
    let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
    let refused =
        bind_addresses(&kernel, &[FUNCTION, SECOND], &bind_request(None, false)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "bind 0000:5f:00.0: nvme1n1 is mounted at /b, expected disks that are not in use"
    );
    assert_eq!(tree.driver_state(), before);

    let tree = TestTree::with_functions("second-function 13");
    let kernel = FakeKernel::new(&tree);
    *kernel.refuses.borrow_mut() =
        Some((function_sysfs_path(SECOND, "driver_override"), Errno::PERM));
    let refused =
        bind_addresses(&kernel, &[FUNCTION, SECOND], &bind_request(None, false)).unwrap_err();
    assert!(
        refused
            .to_string()
            .starts_with("echo 'vfio-pci' > /sys/bus/pci/devices/0000:5f:00.0/driver_override: "),
        "{refused}"
    );
    let remedy = refused.fix();
    assert!(remedy.starts_with("The former state is restored"), "{remedy}");
    assert!(
        tree.driver_state()
            .contains("0000:5e:00.0 driver Some(\"nvme\") override Some(\"(null)\")")
    );
    assert_eq!(functions_bound_by_tenmil(&tree.machine), []);
}

#[test]
fn functions_bound_before_stay_bound_if_a_later_bind_fails() {
    let tree = TestTree::with_functions("second-function 13");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), false)).unwrap();
    for refused in [function_sysfs_path(SECOND, "driver_override"), "dev/vfio/12".to_owned()] {
        *kernel.refuses.borrow_mut() = Some((refused.clone(), Errno::PERM));
        let error = bind_addresses(&kernel, &[FUNCTION, SECOND], &bind_request(Some(1000), false))
            .unwrap_err();
        assert!(matches!(&error, BindError::Step { undone: true, .. }), "{refused}: {error:?}");
        let driver = |at| tree.machine.link_target_name(&function_sysfs_path(at, "driver"));
        assert_eq!(driver(FUNCTION).as_deref(), Some("vfio-pci"), "{refused}");
        assert_eq!(driver(SECOND).as_deref(), Some("nvme"), "{refused}");
        assert_eq!(functions_bound_by_tenmil(&tree.machine), [test_address(FUNCTION)], "{refused}");
    }
}

#[test]
fn function_opened_meanwhile_is_not_unbound_by_undo() {
    let tree = TestTree::with_functions("second-function 13");
    let kernel = FakeKernel::new(&tree);
    kernel.is_awaited.set(true);
    *kernel.refuses.borrow_mut() =
        Some((function_sysfs_path(SECOND, "driver_override"), Errno::PERM));
    let error =
        bind_addresses(&kernel, &[FUNCTION, SECOND], &bind_request(None, false)).unwrap_err();
    assert!(matches!(&error, BindError::Step { undone: false, .. }), "{error:?}");
    let driver = tree.machine.link_target_name(&function_sysfs_path(FUNCTION, "driver"));
    assert_eq!(driver.as_deref(), Some("vfio-pci"), "the kernel would wait without end");
}

#[test]
fn repeated_noiommu_bind_succeeds_unless_opened_by_others() {
    let tree = TestTree::with_functions("no-iommu");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), true)).unwrap();
    let again = bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), true)).unwrap();
    assert!(!again[0].is_new && kernel.given.borrow().is_empty());
    assert_eq!(
        NvmeFunction::at_address(&tree.machine, test_address(FUNCTION)).unwrap().group,
        None
    );
    tree.write_file("proc/41/comm", "tenmil\n");
    tree.link("proc/41/fd/9", "/dev/vfio/noiommu-7");
    let error = unbind_functions(&kernel, &UnbindSelection::All).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "unbind 0000:5e:00.0: process 41 (tenmil) has vfio/noiommu-7 open, expected it not in use"
    );
}

#[test]
fn rejected_step_is_named_and_earlier_steps_are_undone() {
    for (end, expected) in [
        ("driver_override", "echo 'vfio-pci' > /sys/bus/pci/devices/0000:5e:00.0/driver_override"),
        ("nvme/unbind", "echo 0000:5e:00.0 > /sys/bus/pci/drivers/nvme/unbind"),
        ("dev/vfio/12", "chown 1000 its device nodes in /dev/vfio"),
    ] {
        let tree = TestTree::with_functions("");
        let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
        *kernel.refuses.borrow_mut() = Some((end.into(), Errno::ACCESS));
        let refused =
            bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), false)).unwrap_err();
        assert!(refused.to_string().starts_with(expected), "{refused}");
        assert_eq!(refused.category(), tenmil_base::ErrorCategory::Environment);
        *kernel.refuses.borrow_mut() = None;
        unbind_functions(&kernel, &UnbindSelection::All).1.unwrap();
        assert_eq!(tree.driver_state(), before, "{end}");
    }
}

#[test]
fn driver_that_does_not_bind_is_noticed() {
    let tree = TestTree::with_functions("no-iommu");
    let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
    kernel.probes_in_vain.set(true);
    let refused = bind_addresses(&kernel, &[FUNCTION], &bind_request(None, true)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "echo 0000:5e:00.0 > /sys/bus/pci/drivers_probe: driver is none, expected vfio-pci"
    );
    assert!(matches!(&refused, BindError::Step { undone: true, .. }), "{refused:?}");
    assert_eq!(tree.driver_state(), before);
}

#[test]
fn missing_named_driver_is_rejected() {
    let tree = TestTree::with_functions("driver vfio-pci");
    let kernel = FakeKernel::new(&tree);
    for driver in ["none", "../../x", ""] {
        let (back, error) = unbind_functions(
            &kernel,
            &UnbindSelection::To(vec![test_address(FUNCTION)], driver.into()),
        );
        let text = error.unwrap_err().to_string();
        assert_eq!(back, []);
        assert_eq!(
            text,
            format!("unbind 0000:5e:00.0: driver {driver} is not loaded, expected it to be")
        );
    }
}

#[test]
fn noiommu_parameter_is_restored_with_the_last_function() {
    let tree = TestTree::with_functions("second-function 13; no-iommu; no-iommu-second");
    let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
    let switch =
        || tree.machine.read_trimmed("sys/module/vfio/parameters/enable_unsafe_noiommu_mode");
    bind_addresses(&kernel, &[FUNCTION], &bind_request(Some(1000), true)).unwrap();
    bind_addresses(&kernel, &[SECOND], &bind_request(Some(1000), true)).unwrap();
    assert_eq!(switch().as_deref(), Some("Y"));
    assert!(kernel.given.borrow().is_empty(), "no-IOMMU nodes require CAP_SYS_RAWIO");
    let (_, error) =
        unbind_functions(&kernel, &UnbindSelection::These(vec![test_address(FUNCTION)]));
    assert_eq!((error, switch().as_deref()), (Ok(()), Some("Y")));
    unbind_functions(&kernel, &UnbindSelection::All).1.unwrap();
    assert_eq!(tree.driver_state(), before);
}

#[test]
fn unrecorded_function_is_bound_to_the_named_driver() {
    let tree = TestTree::with_functions("driver vfio-pci; override vfio-pci");
    let kernel = FakeKernel::new(&tree);
    let these = vec![test_address(FUNCTION)];
    let refused = plan_unbind(&kernel, &UnbindSelection::These(these.clone())).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "unbind 0000:5e:00.0: driver is 'vfio-pci', and there is no record that tenmil bound it"
    );
    let remedy = "Name the driver to bind: `sudo tenmil unbind 0000:5e:00.0 --to nvme`.";
    assert_eq!(refused.fix(), remedy);
    unbind_functions(&kernel, &UnbindSelection::To(these.clone(), "nvme".into())).1.unwrap();
    assert!(
        tree.driver_state()
            .starts_with("0000:5e:00.0 driver Some(\"nvme\") override Some(\"(null)\")")
    );

    let refused = plan_unbind(&kernel, &UnbindSelection::To(these, "../x".into()));
    assert!(refused.is_ok(), "it has a driver of the kernel's, and nothing is done to it");
}

#[test]
fn damaged_record_is_reported_with_its_fix() {
    let tree = TestTree::with_functions("");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION], &bind_request(None, false)).unwrap();
    tree.write_file("run/tenmil/0000:5e:00.0.bound", "boot 2f1c\ndriver nvme; reboot\n");
    let (back, error) = unbind_functions(&kernel, &UnbindSelection::All);
    let error = error.unwrap_err();
    assert_eq!(back, []);
    assert!(error.to_string().contains("0000:5e:00.0.bound is not as tenmil writes it"), "{error}");
    unbind_functions(&kernel, &UnbindSelection::To(vec![test_address(FUNCTION)], "nvme".into()))
        .1
        .unwrap();
    assert_eq!(functions_bound_by_tenmil(&tree.machine), []);
}

#[test]
fn function_in_use_is_not_unbound() {
    let tree = TestTree::with_functions("");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION], &bind_request(None, false)).unwrap();
    tree.write_file("proc/41/comm", "tenmil\n");
    tree.link("proc/41/fd/9", "/dev/vfio/12");
    let error = unbind_functions(&kernel, &UnbindSelection::All).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "unbind 0000:5e:00.0: process 41 (tenmil) has vfio/12 open, expected it not in use"
    );
    assert_eq!(error.fix(), "End it with `kill 41`.");
    tree.remove("proc/41/fd/9");
    unbind_functions(&kernel, &UnbindSelection::All).1.unwrap();
}

/// The kernel would find the group in use, and neither driver would be bound.
#[test]
fn function_whose_group_is_in_use_is_not_unbound() {
    let tree = TestTree::with_functions("second-function 12");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION, SECOND], &bind_request(None, false)).unwrap();
    tree.write_file(&function_sysfs_path(FUNCTION, "vfio-dev/vfio1/x"), "");
    tree.write_file("proc/41/comm", "tenmil\n");
    tree.link("proc/41/fd/9", "/dev/vfio/devices/vfio1");
    let second = UnbindSelection::These(vec![test_address(SECOND)]);
    let error = unbind_functions(&kernel, &second).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "unbind 0000:5f:00.0: process 41 (tenmil) has vfio/devices/vfio1 open, expected it not in use"
    );
    tree.remove("proc/41/fd/9");
    assert_eq!(unbind_functions(&kernel, &second).0, [test_address(SECOND)]);
}

#[test]
fn missing_original_driver_keeps_the_record() {
    let tree = TestTree::with_functions("second-function 13");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION], &bind_request(None, false)).unwrap();
    tree.remove("sys/bus/pci/drivers/nvme");
    let error = unbind_functions(&kernel, &UnbindSelection::All).1.unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), error.fix().as_str()),
        (
            "unbind 0000:5e:00.0: driver nvme is not loaded, expected it to be",
            "Load it with `sudo modprobe nvme`."
        )
    );
    assert_eq!(functions_bound_by_tenmil(&tree.machine), [test_address(FUNCTION)]);
}

#[test]
fn one_failed_unbind_does_not_prevent_others() {
    let tree = TestTree::with_functions("second-function 13");
    let kernel = FakeKernel::new(&tree);
    bind_addresses(&kernel, &[FUNCTION, SECOND], &bind_request(None, false)).unwrap();
    *kernel.refuses.borrow_mut() =
        Some((function_sysfs_path(FUNCTION, "driver_override"), Errno::IO));
    let (back, error) = unbind_functions(&kernel, &UnbindSelection::All);
    assert_eq!(back, [test_address(SECOND)]);
    assert!(error.is_err());
}

#[test]
fn removed_or_reassigned_function_is_forgotten() {
    for change in ["gone", "driver uio_pci_generic"] {
        let tree = TestTree::with_functions("");
        let kernel = FakeKernel::new(&tree);
        bind_addresses(&kernel, &[FUNCTION], &bind_request(None, false)).unwrap();
        if change == "gone" {
            tree.remove(&function_sysfs_path(FUNCTION, ""));
        } else {
            tree.write_file(&function_sysfs_path(FUNCTION, "driver_override"), "uio_pci_generic\n");
            tree.remove(&function_sysfs_path(FUNCTION, "driver"));
            tree.link(&function_sysfs_path(FUNCTION, "driver"), "../../drivers/uio_pci_generic");
        }
        unbind_functions(&kernel, &UnbindSelection::All).1.unwrap();
        let driver = tree.machine.link_target_name(&function_sysfs_path(FUNCTION, "driver"));
        assert_eq!(driver, (change != "gone").then(|| "uio_pci_generic".into()));
        assert_eq!(functions_bound_by_tenmil(&tree.machine), []);
    }
}

#[test]
fn function_description_has_all_known_properties() {
    let tree =
        TestTree::with_functions("neighbour 0000:5e:00.1 ahci 0x010601; mount nvme0n1p1 /srv");
    let functions = NvmeFunction::all_nvme_functions(&tree.machine);
    assert_eq!(functions.len(), 1, "the neighbour is of another class");
    let function = &functions[0];
    assert_eq!((function.model().as_str(), function.serial()), ("Disk 9", Some("S4EW")));
    assert_eq!(function.controller.as_ref().and_then(|one| one.cmb_bytes), Some(4 << 20));
    assert_eq!((function.vendor, function.device, function.numa_node), (0x8086, 0x0a54, Some(1)));
    assert_eq!(function.driver_override, None);
    let group = function.group.as_ref().unwrap();
    assert_eq!((group.number, group.others[0].driver.as_deref()), (12, Some("ahci")));
    assert_eq!(function.controller.as_ref().unwrap().state.as_deref(), Some("live"));
    let used = function.disk_users(&tree.machine);
    assert_eq!(used.found[0].to_string(), "nvme0n1p1 is mounted at /srv");

    let model = function_sysfs_path(FUNCTION, "nvme/nvme0/model");
    tree.write_file(&model, "(efault)\n");
    let early = &NvmeFunction::all_nvme_functions(&tree.machine)[0];
    assert_eq!(early.model(), "8086:0a54", "its controller has not said anything yet");

    let empty = TestTree::with_functions("gone");
    assert_eq!(NvmeFunction::all_nvme_functions(&empty.machine), []);
    assert_eq!(ProcessesWithOpenDevices::default().found, []);
}
