//! The layers of ARCHITECTURE.md: a crate depends on lower layers only.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "it reads the tree that it checks")]

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

/// Layers from the lowest up. Within layer 0, `wire` depends on `crc`, and within the machine crates, `linux` on `dma`.
const LAYERS: [(&str, u32); 34] = [
    ("tenmil-base", 0),
    ("tenmil-crc", 0),
    ("tenmil-wire", 0),
    ("tenmil-nvme-host", 1),
    ("tenmil-nvme-controller", 1),
    ("tenmil-nvme-auth", 1),
    ("tenmil-nvme-tcp", 1),
    ("tenmil-volume", 1),
    ("tenmil-vfio-user", 1),
    ("tenmil-vhost-user", 1),
    ("tenmil-dma", 1),
    ("tenmil-linux", 1),
    ("tenmil-group", 1),
    ("tenmil-pci", 1),
    ("tenmil-keyring", 2),
    ("tenmil-sim", 2),
    ("tenmil-reactor", 2),
    ("tenmil-tls", 2),
    ("tenmil-block", 3),
    ("tenmil-nvme-fabrics", 3),
    ("tenmil-drivers", 4),
    ("tenmil-serve", 5),
    ("tenmil-crypt", 4),
    ("tenmil-rbd", 4),
    ("tenmil-devices", 5),
    ("tenmil", 6),
    ("tenmil-rpc", 6),
    ("tenmil-cluster", 6),
    ("tenmil-bench", 7),
    ("tenmil-capi", 7),
    ("tenmil-csi", 7),
    ("tenmil-cli", 8),
    ("tenmil-fuzz", 8),
    ("tenmil-xtask", 8),
];

/// Crates with unsafe code. Every other crate forbids it.
const MACHINE: [&str; 4] = ["tenmil-crc", "tenmil-dma", "tenmil-linux", "tenmil-pci"];

/// Other crates with unsafe code, around C libraries: a cipher, TLS, and the client of Ceph.
const FOREIGN_LIBRARIES: [&str; 3] = ["tenmil-crypt", "tenmil-tls", "tenmil-rbd"];

/// Crates with unsafe code at the boundary to programs in other languages.
const BINDINGS: [&str; 1] = ["tenmil-capi"];

/// Executors that the data path must not depend on.
const EXECUTORS: [&str; 3] = ["tokio", "async-std", "smol"];

struct Package {
    name: String,
    dependencies: Vec<String>,
    library: Option<String>,
}

fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let package = |package: &Value| {
        let normal = |dependency: &&Value| dependency["kind"].is_null();
        let dependencies = package["dependencies"].as_array().unwrap().iter().filter(normal);
        let targets = package["targets"].as_array().unwrap();
        let is_library = |target: &&Value| target["kind"][0] == "lib";
        Package {
            name: text(&package["name"]),
            dependencies: dependencies.map(|dependency| text(&dependency["name"])).collect(),
            library: targets.iter().find(is_library).map(|target| text(&target["src_path"])),
        }
    };
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

#[test]
fn every_crate_depends_on_lower_layers_only() {
    let layers = BTreeMap::from(LAYERS);
    for package in packages() {
        let name = package.name.as_str();
        let Some(layer) = layers.get(name) else { panic!("{name} has no layer") };
        for dependency in package.dependencies.iter().filter(|name| name.starts_with("tenmil")) {
            let below = layers[dependency.as_str()] < *layer;
            let within_machine = MACHINE.contains(&name) && dependency == "tenmil-dma";
            let within_lowest = name == "tenmil-wire" && dependency == "tenmil-crc";
            let may = below || within_machine || within_lowest;
            assert!(may, "{name} must not depend on {dependency}");
        }
        for executor in EXECUTORS {
            let sees = package.dependencies.iter().any(|dependency| dependency == executor);
            assert!(!sees || *layer >= 5, "{name} must not see {executor}");
        }
    }
}

#[test]
fn only_listed_crates_have_unsafe_code() {
    for Package { name, library, .. } in packages() {
        let Some(library) = library else { continue };
        let text = std::fs::read_to_string(&library).unwrap();
        let forbids = text.contains("#![forbid(unsafe_code)]");
        let lists: [&[&str]; 3] = [&MACHINE, &FOREIGN_LIBRARIES, &BINDINGS];
        let may = lists.iter().any(|list| list.contains(&name.as_str()));
        assert_eq!(forbids, !may, "{name}: {library}");
    }
}
