//! `cargo xtask`: development tasks that are not part of tenmil.
//!
//! Exit codes: 0 success, 1 a check failed, 2 a check could not be run.

#![forbid(unsafe_code)]
#![expect(
    clippy::disallowed_methods,
    reason = "a program on the top floor: files and time are real"
)]

mod api;
mod book;
mod c_library;
mod ceph;
mod cluster;
mod crash;
mod csi;
mod docs;
mod fairness;
mod fio_engine;
mod fuse_mount;
mod fuse_protocol;
mod lab;
mod operate;
mod package;
mod pgo;
mod python;
mod sim;

use std::process::ExitCode;

use clap::Parser;

/// Development tasks that are not part of tenmil.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", after_help = "Example: cargo xtask lab linux-host")]
enum Task {
    /// Test interoperability with Linux NVMe drivers and targets in QEMU guests.
    Lab(lab::LabOptions),
    /// Test crash consistency: kill processes and cut the power of disks at their flushes.
    Crash(crash::CrashOptions),
    /// Build tenmil without link-time optimization, with it and with a profile, and compare the builds.
    Pgo(pgo::PgoOptions),
    /// Make the Debian package, the static program and the container image, and test them.
    Package(package::PackageOptions),
    /// Make the C library with its header and tarball, and run its examples and checks where it is installed.
    CLibrary(c_library::CLibraryOptions),
    /// Make the I/O engine of fio, and run jobs that verify what they wrote.
    FioEngine(fio_engine::FioEngineOptions),
    /// Make the Python package, and run its tests where it is installed.
    Python(python::PythonOptions),
    /// Write the documentation with its generated references to target/book, and check its links.
    Book(book::BookOptions),
    /// Print the public API of the crate `tenmil`.
    Api,
    /// Run every command of the documentation.
    Docs(docs::DocsOptions),
    /// Measure what fifteen hosts keep beside one with many queues and a high depth.
    Fairness(fairness::FairnessOptions),
    /// Run a server as an operator does: curl, Prometheus with the dashboard and alert rules, the web page.
    Operate(operate::OperateOptions),
    /// Run the driver against a simulated controller that violates its contract in every known way, or hosts
    /// against targets.
    Sim(sim::SimOptions),
    /// Test `rbd:` devices against a Ceph cluster of one node, and measure their speed beside rbd bench and fio.
    Ceph(ceph::CephOptions),
    /// Test a group of gateways with etcd or Ceph: kills, pauses, a store that is cut off or lost, drains, restarts.
    Cluster(cluster::ClusterOptions),
    /// Run csi-sanity against the CSI driver, and kill the driver while it works.
    Csi(csi::CsiOptions),
    /// Serve a device as a loop device, in place of `tenmil serve --listen ublk:`.
    #[command(hide = true)]
    Serve(csi::LoopDiskOptions),
}

fn main() -> ExitCode {
    let (name, ended) = match Task::parse() {
        Task::Lab(options) => ("lab", lab::run_lab(&options)),
        Task::Crash(options) => ("crash", crash::run_crash_tests(&options)),
        Task::Pgo(options) => ("pgo", pgo::run_pgo(&options)),
        Task::Package(options) => ("package", package::run_package(&options)),
        Task::CLibrary(options) => ("c-library", c_library::run_c_library(&options)),
        Task::FioEngine(options) => ("fio-engine", fio_engine::run_fio_engine(&options)),
        Task::Python(options) => ("python", python::run_python(&options)),
        Task::Book(options) => ("book", book::run_book(&options)),
        Task::Api => ("api", api::run_api()),
        Task::Docs(options) => ("docs", docs::run_docs(&options)),
        Task::Fairness(options) => ("fairness", fairness::run_fairness(&options)),
        Task::Operate(options) => ("operate", operate::run_operate(&options)),
        Task::Sim(options) => ("sim", sim::run_sim(&options)),
        Task::Ceph(options) => ("ceph", ceph::run_ceph(&options)),
        Task::Cluster(options) => ("cluster", cluster::run_cluster(&options)),
        Task::Csi(options) => ("csi", csi::run_csi(&options)),
        Task::Serve(options) => ("serve", csi::serve_loop_disk(&options)),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("{name}: {why}");
            ExitCode::from(2)
        }
    }
}
