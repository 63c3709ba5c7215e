"""Checks of this repository that no ready-made tool makes: `python -m lint`, run by `nox -s lint`.

- `shared_code`: rules for code that exists once for all frameworks (what they are and why: `rules`)
- `arrows`: a package's tests import only the package, its declared siblings and `hp_platform.testing`
- `lazy_names`: no module hides a name that its package exports lazily
- `helper_names`: no two modules that tests share have one name
- `top_level`: the top level of the repository holds exactly what the design names
"""
