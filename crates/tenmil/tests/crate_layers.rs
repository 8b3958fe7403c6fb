//! The floors of the house, held true: a crate depends on lower floors only.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "it reads the tree it holds true")]

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

/// Floors from the ground up; within the machine wing, `host` stands on `dma`.
const FLOORS: [(&str, u32); 23] = [
    ("tenmil-base", 0),
    ("tenmil-wire", 0),
    ("tenmil-nvme-host", 1),
    ("tenmil-nvme-controller", 1),
    ("tenmil-nvme-tcp", 1),
    ("tenmil-volume", 1),
    ("tenmil-vfio-user", 1),
    ("tenmil-vhost-user", 1),
    ("tenmil-dma", 1),
    ("tenmil-linux", 1),
    ("tenmil-pci", 1),
    ("tenmil-sim", 2),
    ("tenmil-reactor", 2),
    ("tenmil-bench", 2),
    ("tenmil-block", 3),
    ("tenmil-nvme-fabrics", 3),
    ("tenmil-serve", 4),
    ("tenmil-crypt", 4),
    ("tenmil-rpc", 5),
    ("tenmil-cluster", 5),
    ("tenmil", 6),
    ("tenmil-fuzz", 7),
    ("tenmil-xtask", 7),
];

/// Where `unsafe` may stand. Every other crate forbids it.
const MACHINE_WING: [&str; 3] = ["tenmil-dma", "tenmil-linux", "tenmil-pci"];

/// The one crate outside the machine wing with a room for it, around a cipher.
const AROUND_A_CIPHER: &str = "tenmil-crypt";

/// What the data path must never see.
const KEPT_OUT: [&str; 3] = ["tokio", "async-std", "smol"];

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
fn every_crate_has_a_floor_and_depends_on_lower_ones_only() {
    let floors = BTreeMap::from(FLOORS);
    for package in packages() {
        let name = package.name.as_str();
        let Some(floor) = floors.get(name) else { panic!("{name} is in no drawing") };
        for dependency in package.dependencies.iter().filter(|name| name.starts_with("tenmil")) {
            let below = floors[dependency.as_str()] < *floor;
            let inside_the_wing = MACHINE_WING.contains(&name) && dependency == "tenmil-dma";
            assert!(below || inside_the_wing, "{name} must not depend on {dependency}");
        }
        for kept_out in KEPT_OUT {
            let sees = package.dependencies.iter().any(|dependency| dependency == kept_out);
            assert!(!sees || *floor >= 5, "{name} must not see {kept_out}");
        }
    }
}

#[test]
fn only_the_machine_wing_may_write_unsafe() {
    for Package { name, library, .. } in packages() {
        let Some(library) = library else { continue };
        let text = std::fs::read_to_string(&library).unwrap();
        let forbids = text.contains("#![forbid(unsafe_code)]");
        let may = MACHINE_WING.contains(&name.as_str()) || name == AROUND_A_CIPHER;
        assert_eq!(forbids, !may, "{name}: {library}");
    }
}
