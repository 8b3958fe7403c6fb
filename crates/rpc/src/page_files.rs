//! Static files of the web page. They have no build step, and refer to no other host.
//!
//! The page is a client of the HTTP API like any other: what it shows and changes is in the table of methods,
//! and its forms are made from the OpenAPI document. Its scripts are modules:
//!
//! | file | contents |
//! |---|---|
//! | `page.js` | views, keys, and when something is read |
//! | `views.js` | what each view shows |
//! | `forms.js` | forms, tables and the dialog |
//! | `api.js` | requests, the stream of events, parser of `/metrics` |
//! | `history.js`, `chart.js` | rates and percentiles of the last minutes; line charts |
//! | `dom.js` | elements and formats |
//!
//! Names come from hosts and other users, so text is set as text nodes and attributes only. The policy of
//! the server forbids inline scripts, and assignments of markup where the browser enforces trusted types.

/// File that the server sends as it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageFile {
    /// Path of the request; `/` is the page itself.
    pub(crate) path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) content: &'static [u8],
}

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! page_file {
    ($path:literal, $content_type:expr, $file:literal) => {
        PageFile {
            path: $path,
            content_type: $content_type,
            content: include_bytes!(concat!("page/", $file)),
        }
    };
}

/// All files.
pub(crate) const PAGE_FILES: &[PageFile] = &[
    page_file!("/", "text/html; charset=utf-8", "index.html"),
    page_file!("/page.css", "text/css; charset=utf-8", "page.css"),
    page_file!("/icon.svg", "image/svg+xml", "icon.svg"),
    page_file!("/page.js", JAVASCRIPT, "page.js"),
    page_file!("/views.js", JAVASCRIPT, "views.js"),
    page_file!("/forms.js", JAVASCRIPT, "forms.js"),
    page_file!("/api.js", JAVASCRIPT, "api.js"),
    page_file!("/history.js", JAVASCRIPT, "history.js"),
    page_file!("/chart.js", JAVASCRIPT, "chart.js"),
    page_file!("/dom.js", JAVASCRIPT, "dom.js"),
];

#[cfg(test)]
mod tests {
    use super::PAGE_FILES;

    fn text_of(path: &str) -> &'static str {
        let file = PAGE_FILES.iter().find(|file| file.path == path);
        let file = file.unwrap_or_else(|| panic!("no file {path}"));
        std::str::from_utf8(file.content).unwrap()
    }

    #[test]
    fn every_file_that_the_page_loads_is_served() {
        let page = text_of("/");
        for attribute in ["href=\"", "src=\""] {
            for (at, _) in page.match_indices(attribute) {
                let name = page[at + attribute.len()..].split('"').next().unwrap();
                assert!(name.starts_with('#') || !text_of(&format!("/{name}")).is_empty());
            }
        }
        let scripts = PAGE_FILES.iter().filter(|file| file.path.ends_with(".js"));
        for script in scripts {
            let text = text_of(script.path);
            for line in text.lines().filter(|line| line.starts_with("import ")) {
                let name = line.split('\'').nth(1).unwrap();
                text_of(name.strip_prefix('.').unwrap());
            }
        }
    }

    #[test]
    fn files_name_no_other_host_and_never_assign_markup() {
        let forbidden = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "DOMParser",
            "createContextualFragment",
            "eval(",
            "new Function",
            "javascript:",
            "<style",
            " style=",
            " onclick=",
            " onload=",
        ];
        for file in PAGE_FILES {
            let text = std::str::from_utf8(file.content).unwrap();
            for one in forbidden {
                assert!(!text.contains(one), "{}: {one}", file.path);
            }
            // The namespace of SVG is a name, not an address.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains("http://") && !text.contains("https://"), "{}", file.path);
        }
    }
}
