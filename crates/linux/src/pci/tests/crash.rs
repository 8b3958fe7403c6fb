//! The process ends at any step of binding and unbinding.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::fake_kernel::{FakeKernel, SimulatedCrash};
use super::test_tree::{FUNCTION, SECOND, TestTree, disk_signatures, test_address};
use crate::pci::{
    BindRequest, UnbindSelection, bind_functions, functions_bound_by_tenmil, unbind_functions,
};

/// Machines on which binding takes every kind of step.
const TREES: [(&str, bool); 5] = [
    ("second-function 13", false),
    ("second-function 12; override nvme", false),
    ("second-function 13; driver none", false),
    ("second-function 13; driver uio_pci_generic; override uio_pci_generic", false),
    ("second-function 13; no-iommu; no-iommu-second", true),
];

/// Runs `act` until the process is gone; returns whether it completed.
fn run_until_crash(kernel: &FakeKernel<'_>, calls: u32, act: impl FnOnce(&FakeKernel<'_>)) -> bool {
    kernel.calls_left.set(calls);
    let ended = catch_unwind(AssertUnwindSafe(|| act(kernel)));
    kernel.calls_left.set(u32::MAX);
    match ended {
        Ok(()) => true,
        Err(why) => {
            assert!(why.is::<SimulatedCrash>(), "another panic than the one that was asked for");
            false
        }
    }
}

fn bind_all(kernel: &FakeKernel<'_>, no_iommu: bool) {
    let terms = BindRequest {
        owner: Some(1000),
        no_iommu,
        even_if_in_use: &[],
        signatures: &disk_signatures,
    };
    bind_functions(kernel, &[test_address(FUNCTION), test_address(SECOND)], &terms).unwrap();
}

fn unbind_all(kernel: &FakeKernel<'_>) {
    unbind_functions(kernel, &UnbindSelection::All).1.unwrap();
}

#[test]
fn bind_that_crashes_at_any_step_can_be_unbound() {
    for (words, no_iommu) in TREES {
        for calls in 0.. {
            let tree = TestTree::with_functions(words);
            let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
            let ended = run_until_crash(&kernel, calls, |kernel| bind_all(kernel, no_iommu));
            unbind_all(&kernel);
            assert_eq!(tree.driver_state(), before, "`{words}`, cut after {calls} calls");
            if ended {
                assert!(calls >= 6, "`{words}` takes {calls} calls only");
                break;
            }
        }
    }
}

#[test]
fn unbind_continues_after_a_crash_at_any_step() {
    for (words, no_iommu) in TREES {
        for calls in 0.. {
            let tree = TestTree::with_functions(words);
            let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
            bind_all(&kernel, no_iommu);
            let ended = run_until_crash(&kernel, calls, unbind_all);
            unbind_all(&kernel);
            assert_eq!(tree.driver_state(), before, "`{words}`, cut after {calls} calls");
            if ended {
                break;
            }
        }
    }
}

#[test]
fn bind_continues_after_a_crash_and_keeps_the_original_driver() {
    for (words, no_iommu) in TREES {
        for calls in 0..12 {
            let tree = TestTree::with_functions(words);
            let (kernel, before) = (FakeKernel::new(&tree), tree.driver_state());
            run_until_crash(&kernel, calls, |kernel| bind_all(kernel, no_iommu));
            bind_all(&kernel, no_iommu);
            assert_eq!(
                functions_bound_by_tenmil(&tree.machine),
                [test_address(FUNCTION), test_address(SECOND)]
            );
            unbind_all(&kernel);
            assert_eq!(tree.driver_state(), before, "`{words}`, cut after {calls} calls");
        }
    }
}
