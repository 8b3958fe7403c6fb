//! Steps and their results.

use super::kernel::FakeKernel;
use super::tree::{FUNCTION, SECOND, Tree, address, function, marks};
use crate::Errno;
use crate::holders::Openers;
use crate::pci::{
    BindError, BindRequest, BoundDevice, Function, UnbindSelection, bind, plan_bind, plan_unbind,
    recorded, unbind,
};

fn terms(owner: Option<u32>, no_iommu: bool) -> BindRequest<'static> {
    BindRequest { owner, no_iommu, even_if_in_use: &[], signatures: &marks }
}

fn bound(
    kernel: &FakeKernel<'_>,
    at: &[&str],
    terms: &BindRequest<'_>,
) -> Result<Vec<BoundDevice>, BindError> {
    bind(kernel, &at.iter().map(|at| address(at)).collect::<Vec<_>>(), terms)
}

#[test]
fn the_steps_are_shown_as_a_shell_would_do_them() {
    let tree = Tree::of("");
    let kernel = FakeKernel::new(&tree);
    let verdicts = plan_bind(&kernel, &[address(FUNCTION)], &terms(Some(1000), false)).unwrap();
    let shown: Vec<String> =
        verdicts[0].steps.iter().map(|step| step.command(verdicts[0].address)).collect();
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
fn a_function_goes_to_a_program_and_back() {
    let tree = Tree::of("override nvme");
    let (kernel, before) = (FakeKernel::new(&tree), tree.state());
    let done = bound(&kernel, &[FUNCTION], &terms(Some(1000), false)).unwrap();
    assert_eq!((done[0].original_driver.as_deref(), done[0].is_new), (Some("nvme"), true));
    assert_eq!(*kernel.given.borrow(), [("dev/vfio/12".to_owned(), 1000)]);
    let function = Function::at(&tree.machine, address(FUNCTION)).unwrap();
    assert_eq!(function.driver.as_deref(), Some("vfio-pci"));
    assert_eq!((function.model(), function.disks), ("8086:0a54".into(), vec![]));
    assert_eq!(recorded(&tree.machine), [address(FUNCTION)]);

    for owner in [None, Some(1000)] {
        let again = bound(&kernel, &[FUNCTION], &terms(owner, false)).unwrap();
        assert!(!again[0].is_new && again[0].original_driver.as_deref() == Some("nvme"));
    }

    let (back, error) = unbind(&kernel, &UnbindSelection::All);
    assert_eq!((back, error), (vec![address(FUNCTION)], Ok(())));
    let after = tree.state();
    assert_eq!(after, before);
    assert_eq!(
        unbind(&kernel, &UnbindSelection::All),
        (vec![], Ok(())),
        "there is nothing left to do"
    );
}

#[test]
fn a_door_of_its_own_is_given_where_the_kernel_makes_one() {
    let tree = Tree::of("");
    tree.put("dev/vfio/devices/vfio0", "");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION], &terms(Some(1000), false)).unwrap();
    let given = ["dev/vfio/12", "dev/vfio/devices/vfio0"].map(|door| (door.to_owned(), 1000));
    assert_eq!(*kernel.given.borrow(), given);
}

#[test]
fn functions_are_taken_all_or_none() {
    let tree = Tree::of("second-function 13; mount nvme1n1 /b");
    let (kernel, before) = (FakeKernel::new(&tree), tree.state());
    let refused = bound(&kernel, &[FUNCTION, SECOND], &terms(None, false)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "bind 0000:5f:00.0: nvme1n1 is mounted at /b, expected disks that are not in use"
    );
    assert_eq!(tree.state(), before);

    let tree = Tree::of("second-function 13");
    let kernel = FakeKernel::new(&tree);
    *kernel.refuses.borrow_mut() = Some((function(SECOND, "driver_override"), Errno::PERM));
    let refused = bound(&kernel, &[FUNCTION, SECOND], &terms(None, false)).unwrap_err();
    assert!(
        refused
            .to_string()
            .starts_with("echo 'vfio-pci' > /sys/bus/pci/devices/0000:5f:00.0/driver_override: "),
        "{refused}"
    );
    let remedy = refused.fix();
    assert!(remedy.starts_with("The former state is restored"), "{remedy}");
    assert!(tree.state().contains("0000:5e:00.0 driver Some(\"nvme\") override Some(\"(null)\")"));
    assert_eq!(recorded(&tree.machine), []);
}

#[test]
fn what_was_bound_before_stays_so_whatever_becomes_of_those_after_it() {
    let tree = Tree::of("second-function 13");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION], &terms(Some(1000), false)).unwrap();
    for refused in [function(SECOND, "driver_override"), "dev/vfio/12".to_owned()] {
        *kernel.refuses.borrow_mut() = Some((refused.clone(), Errno::PERM));
        let error = bound(&kernel, &[FUNCTION, SECOND], &terms(Some(1000), false)).unwrap_err();
        assert!(matches!(&error, BindError::Step { undone: true, .. }), "{refused}: {error:?}");
        let driver = |at| tree.machine.link(&function(at, "driver"));
        assert_eq!(driver(FUNCTION).as_deref(), Some("vfio-pci"), "{refused}");
        assert_eq!(driver(SECOND).as_deref(), Some("nvme"), "{refused}");
        assert_eq!(recorded(&tree.machine), [address(FUNCTION)], "{refused}");
    }
}

#[test]
fn what_a_program_has_opened_meanwhile_is_not_taken_from_it_to_undo() {
    let tree = Tree::of("second-function 13");
    let kernel = FakeKernel::new(&tree);
    kernel.is_awaited.set(true);
    *kernel.refuses.borrow_mut() = Some((function(SECOND, "driver_override"), Errno::PERM));
    let error = bound(&kernel, &[FUNCTION, SECOND], &terms(None, false)).unwrap_err();
    assert!(matches!(&error, BindError::Step { undone: false, .. }), "{error:?}");
    let driver = tree.machine.link(&function(FUNCTION, "driver"));
    assert_eq!(driver.as_deref(), Some("vfio-pci"), "the kernel would wait without end");
}

#[test]
fn without_an_iommu_a_function_is_bound_again_and_whoever_drives_it_is_seen() {
    let tree = Tree::of("no-iommu");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION], &terms(Some(1000), true)).unwrap();
    let again = bound(&kernel, &[FUNCTION], &terms(Some(1000), true)).unwrap();
    assert!(!again[0].is_new && kernel.given.borrow().is_empty());
    assert_eq!(Function::at(&tree.machine, address(FUNCTION)).unwrap().group, None);
    tree.put("proc/41/comm", "tenmil\n");
    tree.link("proc/41/fd/9", "/dev/vfio/noiommu-7");
    let error = unbind(&kernel, &UnbindSelection::All).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "unbind 0000:5e:00.0: process 41 (tenmil) has vfio/noiommu-7 open, expected it not in use"
    );
}

#[test]
fn a_step_that_the_kernel_refuses_is_named_and_what_was_done_is_undone() {
    for (end, expected) in [
        ("driver_override", "echo 'vfio-pci' > /sys/bus/pci/devices/0000:5e:00.0/driver_override"),
        ("nvme/unbind", "echo 0000:5e:00.0 > /sys/bus/pci/drivers/nvme/unbind"),
        ("dev/vfio/12", "chown 1000 its device nodes in /dev/vfio"),
    ] {
        let tree = Tree::of("");
        let (kernel, before) = (FakeKernel::new(&tree), tree.state());
        *kernel.refuses.borrow_mut() = Some((end.into(), Errno::ACCESS));
        let refused = bound(&kernel, &[FUNCTION], &terms(Some(1000), false)).unwrap_err();
        assert!(refused.to_string().starts_with(expected), "{refused}");
        assert_eq!(refused.category(), tenmil_base::ErrorCategory::Environment);
        *kernel.refuses.borrow_mut() = None;
        unbind(&kernel, &UnbindSelection::All).1.unwrap();
        assert_eq!(tree.state(), before, "{end}");
    }
}

#[test]
fn a_driver_that_does_not_take_the_function_is_noticed() {
    let tree = Tree::of("no-iommu");
    let (kernel, before) = (FakeKernel::new(&tree), tree.state());
    kernel.probes_in_vain.set(true);
    let refused = bound(&kernel, &[FUNCTION], &terms(None, true)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "echo 0000:5e:00.0 > /sys/bus/pci/drivers_probe: driver is none, expected vfio-pci"
    );
    assert!(matches!(&refused, BindError::Step { undone: true, .. }), "{refused:?}");
    assert_eq!(tree.state(), before);
}

#[test]
fn a_driver_that_is_said_and_not_there_is_refused() {
    let tree = Tree::of("driver vfio-pci");
    let kernel = FakeKernel::new(&tree);
    for driver in ["none", "../../x", ""] {
        let (back, error) =
            unbind(&kernel, &UnbindSelection::To(vec![address(FUNCTION)], driver.into()));
        let text = error.unwrap_err().to_string();
        assert_eq!(back, []);
        assert_eq!(
            text,
            format!("unbind 0000:5e:00.0: driver {driver} is not loaded, expected it to be")
        );
    }
}

#[test]
fn the_switch_for_life_without_an_iommu_is_put_back_with_the_last() {
    let tree = Tree::of("second-function 13; no-iommu; no-iommu-second");
    let (kernel, before) = (FakeKernel::new(&tree), tree.state());
    let switch = || tree.machine.text("sys/module/vfio/parameters/enable_unsafe_noiommu_mode");
    bound(&kernel, &[FUNCTION], &terms(Some(1000), true)).unwrap();
    bound(&kernel, &[SECOND], &terms(Some(1000), true)).unwrap();
    assert_eq!(switch().as_deref(), Some("Y"));
    assert!(kernel.given.borrow().is_empty(), "such doors open to root alone");
    let (_, error) = unbind(&kernel, &UnbindSelection::These(vec![address(FUNCTION)]));
    assert_eq!((error, switch().as_deref()), (Ok(()), Some("Y")));
    unbind(&kernel, &UnbindSelection::All).1.unwrap();
    assert_eq!(tree.state(), before);
}

#[test]
fn what_is_not_ours_is_given_to_the_driver_that_is_said() {
    let tree = Tree::of("driver vfio-pci; override vfio-pci");
    let kernel = FakeKernel::new(&tree);
    let these = vec![address(FUNCTION)];
    let refused = plan_unbind(&kernel, &UnbindSelection::These(these.clone())).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "unbind 0000:5e:00.0: driver is 'vfio-pci', and there is no record that tenmil bound it"
    );
    let remedy = "Name the driver to bind: `sudo tenmil unbind 0000:5e:00.0 --to nvme`.";
    assert_eq!(refused.fix(), remedy);
    unbind(&kernel, &UnbindSelection::To(these.clone(), "nvme".into())).1.unwrap();
    assert!(
        tree.state().starts_with("0000:5e:00.0 driver Some(\"nvme\") override Some(\"(null)\")")
    );

    let refused = plan_unbind(&kernel, &UnbindSelection::To(these, "../x".into()));
    assert!(refused.is_ok(), "it has a driver of the kernel's, and nothing is done to it");
}

#[test]
fn a_damaged_record_is_named_with_what_helps() {
    let tree = Tree::of("");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION], &terms(None, false)).unwrap();
    tree.put("run/tenmil/0000:5e:00.0.bound", "boot 2f1c\ndriver nvme; reboot\n");
    let (back, error) = unbind(&kernel, &UnbindSelection::All);
    let error = error.unwrap_err();
    assert_eq!(back, []);
    assert!(error.to_string().contains("0000:5e:00.0.bound is not as tenmil writes it"), "{error}");
    unbind(&kernel, &UnbindSelection::To(vec![address(FUNCTION)], "nvme".into())).1.unwrap();
    assert_eq!(recorded(&tree.machine), []);
}

#[test]
fn a_function_that_a_program_drives_is_not_given_back() {
    let tree = Tree::of("");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION], &terms(None, false)).unwrap();
    tree.put("proc/41/comm", "tenmil\n");
    tree.link("proc/41/fd/9", "/dev/vfio/12");
    let error = unbind(&kernel, &UnbindSelection::All).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "unbind 0000:5e:00.0: process 41 (tenmil) has vfio/12 open, expected it not in use"
    );
    assert_eq!(error.fix(), "End it with `kill 41`.");
    tree.remove("proc/41/fd/9");
    unbind(&kernel, &UnbindSelection::All).1.unwrap();
}

/// The kernel would find the group in use, and neither driver would be bound.
#[test]
fn a_function_of_whose_group_a_program_drives_another_is_not_given_back() {
    let tree = Tree::of("second-function 12");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION, SECOND], &terms(None, false)).unwrap();
    tree.put(&function(FUNCTION, "vfio-dev/vfio1/x"), "");
    tree.put("proc/41/comm", "tenmil\n");
    tree.link("proc/41/fd/9", "/dev/vfio/devices/vfio1");
    let second = UnbindSelection::These(vec![address(SECOND)]);
    let error = unbind(&kernel, &second).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "unbind 0000:5f:00.0: process 41 (tenmil) has vfio/devices/vfio1 open, expected it not in use"
    );
    tree.remove("proc/41/fd/9");
    assert_eq!(unbind(&kernel, &second).0, [address(SECOND)]);
}

#[test]
fn a_driver_that_is_gone_keeps_its_function_recorded() {
    let tree = Tree::of("second-function 13");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION], &terms(None, false)).unwrap();
    tree.remove("sys/bus/pci/drivers/nvme");
    let error = unbind(&kernel, &UnbindSelection::All).1.unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), error.fix().as_str()),
        (
            "unbind 0000:5e:00.0: driver nvme is not loaded, expected it to be",
            "Load it with `sudo modprobe nvme`."
        )
    );
    assert_eq!(recorded(&tree.machine), [address(FUNCTION)]);
}

#[test]
fn one_that_cannot_be_given_back_does_not_keep_the_others() {
    let tree = Tree::of("second-function 13");
    let kernel = FakeKernel::new(&tree);
    bound(&kernel, &[FUNCTION, SECOND], &terms(None, false)).unwrap();
    *kernel.refuses.borrow_mut() = Some((function(FUNCTION, "driver_override"), Errno::IO));
    let (back, error) = unbind(&kernel, &UnbindSelection::All);
    assert_eq!(back, [address(SECOND)]);
    assert!(error.is_err());
}

#[test]
fn what_was_pulled_out_or_given_away_meanwhile_is_forgotten() {
    for change in ["gone", "driver uio_pci_generic"] {
        let tree = Tree::of("");
        let kernel = FakeKernel::new(&tree);
        bound(&kernel, &[FUNCTION], &terms(None, false)).unwrap();
        if change == "gone" {
            tree.remove(&function(FUNCTION, ""));
        } else {
            tree.put(&function(FUNCTION, "driver_override"), "uio_pci_generic\n");
            tree.remove(&function(FUNCTION, "driver"));
            tree.link(&function(FUNCTION, "driver"), "../../drivers/uio_pci_generic");
        }
        unbind(&kernel, &UnbindSelection::All).1.unwrap();
        let driver = tree.machine.link(&function(FUNCTION, "driver"));
        assert_eq!(driver, (change != "gone").then(|| "uio_pci_generic".into()));
        assert_eq!(recorded(&tree.machine), []);
    }
}

#[test]
fn a_function_is_described_with_all_that_is_known_of_it() {
    let tree = Tree::of("neighbour 0000:5e:00.1 ahci 0x010601; mount nvme0n1p1 /srv");
    let functions = Function::all(&tree.machine);
    assert_eq!(functions.len(), 1, "the neighbour is of another class");
    let function = &functions[0];
    assert_eq!((function.model().as_str(), function.serial()), ("Disk 9", Some("S4EW")));
    assert_eq!(function.controller.as_ref().and_then(|one| one.cmb_bytes), Some(4 << 20));
    assert_eq!((function.vendor, function.device, function.numa_node), (0x8086, 0x0a54, Some(1)));
    assert_eq!(function.driver_override, None);
    let group = function.group.as_ref().unwrap();
    assert_eq!((group.number, group.others[0].driver.as_deref()), (12, Some("ahci")));
    assert_eq!(function.controller.as_ref().unwrap().state.as_deref(), Some("live"));
    let used = function.users(&tree.machine);
    assert_eq!(used.found[0].to_string(), "nvme0n1p1 is mounted at /srv");

    let model = super::tree::function(FUNCTION, "nvme/nvme0/model");
    tree.put(&model, "(efault)\n");
    let early = &Function::all(&tree.machine)[0];
    assert_eq!(early.model(), "8086:0a54", "its controller has not said anything yet");

    let empty = Tree::of("gone");
    assert_eq!(Function::all(&empty.machine), []);
    assert_eq!(Openers::default().found, []);
}
